"""Set a hardware model's prediction intervals from validation results, by what the model of today predicts.

    python scripts/set_uncertainty.py hwmodels/h200.json validate/results/kinds_h200_20261123.json ...

Conformal prediction with groups (Dunn, Wasserman, Ramdas 2023): a new step is taken to be like the measured ones, so
all steps weigh the same, however many schedules each has. `schedule_frac` is the least error within which 90 % of the
schedules of mostly convolutional steps lie, one more step counted as outside. For other steps, the mean absolute error
is fitted as a line of the predicted saving (Lei et al. 2018: conformal prediction scaled by the expected error).
`less_known_frac` and `saving_frac` are that line times the least factor with which 90 % lie within, counted the same
way. So a kind with fewer than nine steps shares the width of all kinds. `searched_frac` is the least further time
within which 90 % of the steps' searched schedules end, beyond the intervals of all, counted the same way. Other
fractions stay.

Schedules with variants or wrong outputs, and networks that a constant was fitted on, are left out. The table says how
many lie within, also if their own network, or all steps of their kind, are left out of the fit. The form of the rules
was chosen with most of these steps in sight, so this is no blind test.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from gpusim.engine.fast import FastEngine
from gpusim.formats.hardware import HardwareModel, Uncertainty, read_hardware, saved_frac
from gpusim.formats.results import ResultCase
from gpusim.io.files import write_document
from gpusim.plan.graph import OpGraph
from gpusim.plan.lower import lower
from gpusim.plan.schedule import Schedule
from gpusim.validation.again import replayed_schedules

NETWORKS = Path(__file__).resolve().parent.parent / "validate" / "networks"
CONVOLUTIONAL, VISION_TRANSFORMER = "convolutional", "vision transformer"
#: Networks of libraries that are no convolutional ones; `validate/networks` has a file for each other kind.
VISION_TRANSFORMERS = (
    "vit_b_16",
    "swin_t",
    "swin_v2_t",
    "maxvit_t",
    "deit3_small_patch16_224",
    "beit_base_patch16_224",
    "crossvit_9_240",
    "coatnet_0_rw_224",
    "mobilevit_s",
    "twins_svt_small",
    "pit_s_224",
    "davit_tiny",
    "tnt_s_patch16_224",
    "xcit_tiny_12_p16_224",
    "cait_xxs24_224",
)
COVERED = 0.9
#: Decimals of the numbers written.
DIGITS = 3


@dataclass(frozen=True)
class Case:
    """A replayed schedule on several streams, with its prediction of today."""

    step: str
    network: str
    kind: str
    measured_ns: int
    predicted_ns: int
    sequential_ns: float
    less_known: bool
    searched: bool = False

    @property
    def error_frac(self) -> float:
        """Absolute error as a share of the predicted time."""
        return abs(self.measured_ns / self.predicted_ns - 1)

    @property
    def saved_frac(self) -> float:
        """Predicted saving that widens its interval, as a share of the predicted time."""
        return saved_frac(self.predicted_ns, self.sequential_ns)

    def margins(self, uncertainty: Uncertainty) -> tuple[float, float]:
        """Return by which shares of its predicted time it may take less and more."""
        return uncertainty.margins(
            self.predicted_ns,
            self.sequential_ns,
            2,
            searched=self.searched,
            less_known=self.less_known,
        )

    def ends_within(self, uncertainty: Uncertainty) -> bool:
        """Return whether the measured time is no longer than the interval allows."""
        return self.measured_ns <= self.predicted_ns * (1 + self.margins(uncertainty)[1])

    def within(self, uncertainty: Uncertainty) -> bool:
        """Return whether the measured time lies within the interval."""
        less, more = self.margins(uncertainty)
        return self.predicted_ns * (1 - less) <= self.measured_ns <= self.predicted_ns * (1 + more)


def kind_of(network: str) -> str:
    """Return the kind of a network by its name."""
    own = network.partition("_")[0]
    if (NETWORKS / f"{own}.py").is_file():
        return own
    return VISION_TRANSFORMER if network in VISION_TRANSFORMERS else CONVOLUTIONAL


def read_cases(files: Iterable[Path]) -> list[Case]:
    """Return the cases of results files, predicted again."""
    engine = FastEngine()
    cases: list[Case] = []
    for file in files:
        for case, graph, schedule in replayed_schedules(file):
            if case.streams < 2 or case.fitted or schedule.has_variants or schedule.partitions:
                continue
            if not case.outputs_equal:  # such a time is no evidence
                continue
            cases.append(as_case(case, graph, schedule, engine))
    return cases


def as_case(case: ResultCase, graph: OpGraph, schedule: Schedule, engine: FastEngine) -> Case:
    """Return a case of a results file, predicted again."""
    return Case(
        case.trace,
        case.network,
        kind_of(case.network),
        case.measured_ns,
        engine.run(lower(graph, schedule), graph.hardware).makespan_ns,
        graph.sequential_ns,
        graph.less_known,
        schedule.searched,
    )


def shares(cases: Sequence[Case]) -> list[float]:
    """Return the weight of each case: all steps the same; together 1."""
    sizes = Counter(case.step for case in cases)
    return [1 / sizes[case.step] / len(sizes) for case in cases]


def least_frac(cases: Sequence[Case], within: Callable[[Case, float], bool]) -> float:
    """Return the least fraction with which enough of the cases are within, one more step counted as outside."""
    steps = len({case.step for case in cases})
    needed = min(1.0, COVERED * (steps + 1) / steps)
    weights = shares(cases)
    low, high = 0, 10**DIGITS  # in units of the last digit; `high` is always enough of a share, or the answer is 1
    while low < high:
        middle = (low + high) // 2
        inside = math.fsum(
            weight for case, weight in zip(cases, weights, strict=True) if within(case, middle / 10**DIGITS)
        )
        low, high = (low, middle) if inside >= needed - 1e-9 else (middle + 1, high)
    return low / 10**DIGITS


def error_line(cases: Sequence[Case]) -> tuple[float, float]:
    """Return the mean absolute error without a saving, and its rise by the saving: least squares, none below 0."""
    rows = [(weight, case.saved_frac, case.error_frac) for weight, case in zip(shares(cases), cases, strict=True)]
    mean_saving, mean_error = (
        math.fsum(w * saving for w, saving, _ in rows),
        math.fsum(w * error for w, _, error in rows),
    )
    spread = math.fsum(w * (saving - mean_saving) ** 2 for w, saving, _ in rows)
    together = math.fsum(w * (saving - mean_saving) * (error - mean_error) for w, saving, error in rows)
    rise = max(0.0, together / spread) if spread > 0.0 else 0.0
    if (start := mean_error - rise * mean_saving) >= 0.0:
        return start, rise
    return 0.0, math.fsum(w * saving * error for w, saving, error in rows) / math.fsum(w * s * s for w, s, _ in rows)


def fitted(cases: Sequence[Case], base: Uncertainty) -> Uncertainty:
    """Return `base` with the fractions of these cases; a fraction of which there is no case stays."""
    former_frac, base = base.searched_frac, msgspec.structs.replace(base, searched_frac=0.0)
    known = [case for case in cases if not case.less_known]
    others = [case for case in cases if case.less_known]
    if known:
        frac = least_frac(known, lambda case, f: case.within(msgspec.structs.replace(base, schedule_frac=f)))
        base = msgspec.structs.replace(base, schedule_frac=frac)
    if others:
        start, rise = error_line(others)
        of_time = start / (start + rise) if start + rise > 0.0 else 1.0

        def with_sum(frac: float) -> Uncertainty:
            less_known_frac = round(of_time * frac, DIGITS)
            return msgspec.structs.replace(
                base, less_known_frac=less_known_frac, saving_frac=round(frac - less_known_frac, DIGITS)
            )

        base = with_sum(least_frac(others, lambda case, f: case.within(with_sum(f))))
    searched = [case for case in cases if case.searched]
    if not searched:
        return msgspec.structs.replace(base, searched_frac=former_frac)
    width = base
    frac = least_frac(searched, lambda case, f: case.ends_within(msgspec.structs.replace(width, searched_frac=f)))
    return msgspec.structs.replace(base, searched_frac=frac)


def left_out(cases: Sequence[Case], base: Uncertainty, group: Callable[[Case], str]) -> dict[Case, bool]:
    """Return whether each case is within the interval fitted without its group."""
    within: dict[Case, bool] = {}
    for name in sorted({group(case) for case in cases}):
        uncertainty = fitted([case for case in cases if group(case) != name], base)
        within |= {case: case.within(uncertainty) for case in cases if group(case) == name}
    return within


def table(cases: Sequence[Case], base: Uncertainty) -> list[str]:
    """Return a table of the shares within, by kind: fitted on all, and with a network or a kind left out."""
    uncertainty = fitted(cases, base)
    columns = [
        {case: case.within(uncertainty) for case in cases},
        left_out(cases, base, lambda case: case.network),
        left_out(cases, base, lambda case: case.kind),
    ]
    lines = [
        "| kind | schedules | within | its network left out | its kind left out |",
        "|---|--:|--:|--:|--:|",
    ]
    for kind in ("all", *sorted({case.kind for case in cases})):
        chosen = [case for case in cases if kind in ("all", case.kind)]
        cells = [f"{sum(column[case] for case in chosen) / len(chosen):.0%}" for column in columns]
        lines.append(f"| {kind} | {len(chosen)} | {' | '.join(cells)} |")
    return lines


def with_intervals(model: HardwareModel, uncertainty: Uncertainty, files: Sequence[Path], cases: int) -> HardwareModel:
    """Return the model with these fractions and their source."""
    source = (
        f"{cases} replayed schedules of {', '.join(file.name for file in files)}, predicted by the rules of the day: "
        "the least at which 90 % lie within, a new step counted as outside (scripts/set_uncertainty.py, "
        "research/2026-11-28-intervals.md, research/2026-11-29-six-blind-steps.md); the form of the rules was "
        "chosen with most of them in sight"
    )
    same = "as uncertainty.schedule_frac"
    sources = {
        "uncertainty.schedule_frac": source,
        "uncertainty.less_known_frac": same,
        "uncertainty.saving_frac": same,
        "uncertainty.searched_frac": f"{same}, their searched schedules (research/2026-11-30-margin.md)",
    }
    return msgspec.structs.replace(model, uncertainty=uncertainty, sources={**model.sources, **sources})


def main(model_file: str, *results_files: str) -> None:
    """Rewrite the model's `uncertainty` section and its sources."""
    files = [Path(file) for file in results_files]
    model = read_hardware(Path(model_file))
    cases = read_cases(files)
    uncertainty = fitted(cases, model.uncertainty)
    write_document(Path(model_file), with_intervals(model, uncertainty, files, len(cases)), indent=1)
    print("\n".join(table(cases, model.uncertainty)))
    fractions = uncertainty.schedule_frac, uncertainty.less_known_frac, uncertainty.saving_frac
    print("{}: schedules {:.1%}, less known {:.1%}, of the saving {:.1%}".format(model_file, *fractions))
    print(f"searched ones {uncertainty.searched_frac:.1%} more")


if __name__ == "__main__":
    main(*sys.argv[1:])
