"""What measurements say of cost models: calibration, prediction, exports."""
