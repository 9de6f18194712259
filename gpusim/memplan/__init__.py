"""Memory plans: which tensors of a step stay on the GPU, move to the host, or are recomputed."""
