"""Memory policies: one published system one file. The registry is in `gpusim.memplan.policies.registry`."""
