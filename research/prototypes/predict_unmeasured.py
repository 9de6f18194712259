"""Today's predictions of schedules that were chosen and committed earlier, before any of them has run.

    python research/prototypes/predict_unmeasured.py OUT.json RECIPE:TRACE...

RECIPE is a file of validate/, TRACE the name of one of its steps. OUT has, for each schedule, the predicted time and
the 90 % interval in ns: by the code of the day when the schedules were chosen, and by today's.
"""

from __future__ import annotations

import datetime
import json
import sys
from pathlib import Path
from typing import Any

from gpusim.engine.fast import FastEngine
from gpusim.plan.graph import OpGraph
from gpusim.plan.lower import lower
from gpusim.trace.store import read_trace
from gpusim.validation.chosen import hardware_of
from gpusim.validation.predictions import read_predictions
from gpusim.validation.recipe import read_recipe
from gpusim.validation.stages import predicted_path, trace_path
from gpusim.version import code_version


def predictions_of(recipe_path: str, name: str) -> dict[str, Any]:
    """Return the predictions of one step's schedules, then and today."""
    recipe = read_recipe(Path(recipe_path))
    (case,) = (case for case in recipe.case if trace_path(case, recipe).name.removesuffix(".json.gz") == name)
    path = trace_path(case, recipe)
    trace = read_trace(path)
    graph = OpGraph.build(trace, hardware_of(trace))
    file = predicted_path(case, recipe)
    then = read_predictions(file, path)
    schedules = []
    for schedule, interval_ns in zip(then.chosen(graph, str(file)).schedules, then.intervals_ns, strict=True):
        today_ns = FastEngine().run(lower(graph, schedule), graph.hardware).makespan_ns
        today_interval_ns = schedule.interval_ns(graph, today_ns)
        schedules.append(
            {
                "policy": schedule.policy,
                "streams": schedule.stream_count,
                "then_ns": schedule.predicted_ns,
                "then_interval_ns": interval_ns,
                "today_ns": today_ns,
                "today_interval_ns": today_interval_ns,
            }
        )
    return {"recipe": recipe.name, "trace": name, "trace_sha256": then.trace_sha256, "then": then.code,
            "then_date": then.date, "schedules": schedules}  # fmt: skip


def main() -> None:
    out, *steps = sys.argv[1:]
    told = {
        "code": code_version(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "steps": [predictions_of(*step.split(":")) for step in steps],
    }
    Path(out).write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
