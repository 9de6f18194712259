"""Write a simulated timeline for ui.perfetto.dev, and the schedule for `gpusim replay`. Needs no GPU."""

import sys
from pathlib import Path

import gpusim

folder = Path(sys.argv[1] if len(sys.argv) > 1 else ".")
step = gpusim.load("googlenet-infer-b1")
best = gpusim.explore(step, streams=4, evaluations=200)
best.save(folder / "best.json")

simulated = gpusim.simulate(step, best.schedule)
gpusim.write_perfetto(simulated, folder / "timeline.json.gz")
print(f"{simulated}; open {folder / 'timeline.json.gz'} at ui.perfetto.dev")
