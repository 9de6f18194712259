"""`gpusim.optimize`: a step as a callable that runs the best schedule found on the user's own tensors."""
