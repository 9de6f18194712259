"""Capture, replay and calibration: everything that needs torch and a GPU. Nothing else in gpusim imports torch."""
