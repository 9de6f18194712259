"""Lower bounds on the makespan of any schedule of a step, and the proofs that they rest on."""
