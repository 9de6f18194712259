"""Memory plans: what of a step's memory stays on the GPU, what moves to the host, what is computed again."""
