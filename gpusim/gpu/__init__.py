"""Everything that needs torch and a GPU: capture, replay, calibrate. Nothing else in gpusim imports torch."""
