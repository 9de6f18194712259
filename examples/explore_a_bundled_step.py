"""Should a training step of GoogLeNet use CUDA streams? Needs no GPU."""

import gpusim

step = gpusim.load("googlenet-train-b8")
best = gpusim.explore(step, streams=8, evaluations=500)  # a number of simulations gives the same result everywhere

print(best)
print(best.verdict)
for row in best.verdict.rows:
    print(f"  {row.label:28} {row.time_ns / 1e6:7.3f} ms  {row.advice}")
