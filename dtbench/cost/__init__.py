"""What measurements say of cost models: calibration, regret, prediction, exports."""
