"""Why is a schedule not faster, and would any other be? Needs no GPU."""

import gpusim

step = gpusim.load("googlenet-infer-b1")

explained = gpusim.explain(step, "critical_path", streams=4)
print(explained)
for cause, lost_ns in explained.causes_ns().items():
    print(f"  {cause:20} {lost_ns / 1e3:7.1f} us")

limits = gpusim.limits(step)
print(limits)
for loss in limits.scopes[-1].losses:
    print(f"  {loss.limit:20} {loss.loss_ns / 1e3:7.1f} us")
