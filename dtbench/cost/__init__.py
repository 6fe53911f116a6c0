"""Cost models: calibration, estimates, bucket sizes, exports and the planner of training layouts."""
