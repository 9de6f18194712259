"""What would the step take on another GPU, with fewer SMs, or with a faster operation? Needs no GPU."""

import gpusim

step = gpusim.load("googlenet-train-b8")
for hw in ("h200", "a100-80gb"):
    print(gpusim.simulate(step.on(hw), "critical_path", streams=4))

half = gpusim.whatif(step, sms=66)
print(f"half of the SMs: {half.speedup:.2f}x")

faster = gpusim.whatif(step, ops={"conv1.conv": 2.0})
print(f"the first convolution twice as fast: {faster.speedup:.2f}x")
