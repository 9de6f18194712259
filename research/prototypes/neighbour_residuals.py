"""What is measured beyond the prediction among the schedules of one step, by features of their simulated timelines.

    python research/prototypes/neighbour_residuals.py OUT.json validate/results/neighbours_h200_20261124.json

Writes the features of the schedules on several streams to OUT.json; where it exists, only prints. Slopes are ns beyond
the prediction for one more of a feature, inside the step; `given` at equal predicted time and origin. Tau within 5 % of
the fastest and regret of all are those of predictions plus slope times feature: with the slope of the other networks,
with features chosen by them, too, and with the step's own slope, which no prediction can have.
"""

import itertools
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import numpy as np
from timeline_features import features

from gpusim.engine.fast import FastEngine
from gpusim.plan.lower import lower
from gpusim.validation.again import replayed_schedules
from gpusim.validation.models import NEAR_FRAC
from gpusim.validation.neighbours import BY_BLOCKS, BY_POOL
from gpusim.validation.statistics import NOISE_FRAC, counted_replays

TOP = 8


class Step:
    """Schedules of one step: times in ns, and features, one column each; `x` and `y` are relative to its means."""

    def __init__(self, name: str, rows: list[dict[str, Any]], names: list[str]) -> None:
        self.name, self.network = name, rows[0]["network"]
        self.origin = np.array([row["policy"] if row["policy"] in (BY_BLOCKS, BY_POOL) else "" for row in rows])
        self.recordings = statistics.median(row["recordings_ns"] / row["measured_ns"] for row in rows)
        self.measured, self.predicted = (
            np.array([row[k] for row in rows], float) for k in ("measured_ns", "predicted_ns")
        )
        self.values = np.array([[row["features"].get(name, 0) for name in names] for row in rows], float)
        self.x = (self.values - self.values.mean(axis=0)) / np.median(self.measured)
        beyond = self.measured - self.predicted
        self.y = (beyond - beyond.mean()) / np.median(self.measured)
        self.near = self.measured <= (1 + NEAR_FRAC) * self.measured.min()

    def given(self, column: int, base: int) -> float:
        """Return the slope of a feature at equal predicted time, in column `base`, and equal origin."""
        x, y = self.x[:, [column, base]].copy(), self.y.copy()
        for rows in (self.origin == each for each in set(self.origin)):
            x[rows], y[rows] = x[rows] - x[rows].mean(axis=0), y[rows] - y[rows].mean()
        return float(np.linalg.lstsq(x, y, rcond=None)[0][0]) if x[:, 0].std() and column != base else 0.0

    def quality(self, columns: list[int], slopes: Any) -> np.ndarray:
        """Return tau near the best and regret with corrected predictions."""
        times, slow = self.predicted + self.values[:, columns] @ slopes, self.measured[self.near][:, None]
        told = (times[self.near][:, None] > times[self.near])[slow >= slow.T * (1 + NOISE_FRAC)]
        return np.array([2 * told.mean() - 1, self.measured[times.argmin()] / self.measured.min() - 1])


def fitted(steps: list[Step], columns: list[int]) -> Any:
    """Return the slopes by least squares, all steps with equal weight."""
    x, y = (np.concatenate([getattr(step, k) / len(step.y) ** 0.5 for step in steps]) for k in "xy")
    return np.linalg.lstsq(x[:, columns], y, rcond=None)[0]


def main() -> None:
    """Print the tables."""
    if not (file := Path(sys.argv[1])).exists():
        rows = []
        for case, graph, schedule in replayed_schedules(Path(sys.argv[2])):
            if counted_replays([case]):
                timeline = FastEngine().run(lower(graph, schedule, memory=False), graph.hardware, record=True)
                own = {"events": case.events, "streams": case.streams, **features(timeline, graph.hardware)}
                keys = {"step": case.trace, "network": case.network, "policy": case.policy, "features": own}
                times = {"measured_ns": case.measured_ns, "recordings_ns": case.slowest_ns - case.fastest_ns}
                rows.append({**keys, **times, "predicted_ns": timeline.makespan_ns})
        file.write_text(json.dumps(rows))
    rows = json.loads(file.read_text())
    names = sorted({name for row in rows for name in row["features"]})
    steps = [Step(step, list(of), names) for step, of in itertools.groupby(rows, key=lambda row: row["step"])]
    others = {step.network: [other for other in steps if other.network != step.network] for step in steps}
    for step in steps:
        groups = [step.origin != "none", step.origin == BY_BLOCKS, step.origin == BY_POOL]
        slopes = [np.polyfit(step.predicted[k], step.measured[k], 1)[0] for k in groups]
        correlation, quality = np.corrcoef(step.predicted, step.measured)[0, 1], step.quality([], [])
        print(step.name, "beyond, by blocks, by the pool:", *(step.y[k].mean() for k in groups[1:]))
        print(step.name, quality, "measured on predicted:", *slopes, correlation, step.y.std(), step.recordings)
    print(
        "feature|slope|sign alike|median r|given: slope, above 0, below|held out|own|",
        steps[-1].name,
        "own, fastest, best",
    )
    for column, name in enumerate(names):
        slope, own = fitted(steps, [column])[0], [fitted([step], [column]) for step in steps]
        r = [abs(np.corrcoef(s.x[:, column], s.y)[0, 1]) if s.x[:, column].std() else 0.0 for s in steps]
        given, last = [step.given(column, base=names.index("predicted time")) for step in steps], steps[-1]
        held_out = np.mean([s.quality([column], fitted(others[s.network], [column])) for s in steps], axis=0)
        by_own = [s.quality([column], each) for s, each in zip(steps, own, strict=True)]
        top = [np.median(last.values[times.argsort()[:TOP], column]) for times in (last.measured, last.predicted)]
        alike = f"{sum(each[0] * slope > 0 for each in own)} of {sum(bool(each[0]) for each in own)}"
        signs = f"{statistics.median(given):.3g}, {sum(s > 0 for s in given)}, {sum(s < 0 for s in given)}"
        print(f"{name}|{slope:.3g}|{alike}|{statistics.median(r):.2f}|{signs}|{held_out}", end="|")
        print(np.mean(by_own, axis=0), by_own[-1], *top, " ".join(f"{each[0]:.3g}" for each in own), sep="|")
    for size in (1, 2):
        choices = [list(each) for each in itertools.combinations(range(len(names)), size)]
        quality = {}
        for columns in choices:
            for network, of in others.items():
                slopes = fitted(of, columns)
                quality[network, tuple(columns)] = {step.name: step.quality(columns, slopes) for step in steps}
        mean = {tuple(c): np.mean([quality[s.network, tuple(c)][s.name] for s in steps], axis=0) for c in choices}
        for columns in (
            sorted(mean, key=lambda each: -mean[each][0])[:3] + sorted(mean, key=lambda each: mean[each][1])[:2]
        ):
            print("chosen by all:", mean[columns], [names[c] for c in columns], fitted(steps, list(columns)))
            print("  by step:", *(quality[step.network, columns][step.name] for step in steps))
        nested = []
        for step in steps:
            of = {c: np.mean([quality[step.network, c][s.name][0] for s in others[step.network]]) for c in mean}
            columns = max(of, key=of.__getitem__)
            nested.append(quality[step.network, columns][step.name])
            print("chosen by others:", step.name, nested[-1], [names[c] for c in columns])
        print("mean:", np.mean(nested, axis=0))


if __name__ == "__main__":
    main()
