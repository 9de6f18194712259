"""Calibration: constants and rules of the hardware model, measured on the current GPU."""
