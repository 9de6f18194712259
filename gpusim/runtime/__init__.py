"""Everything that needs torch and a GPU: capture, calibrate, replay. Nothing else in gpusim imports torch."""
