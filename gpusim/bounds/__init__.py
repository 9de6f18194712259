"""Lower bounds on the makespan of any schedule of a step, with proofs."""
