"""Functions of `import gpusim` on several steps at once."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from gpusim.api.resolve import AnyStep, Progress, check_seed, check_streams, ignore
from gpusim.arguments import whole
from gpusim.defaults import DEFAULT_SEED, DEFAULT_STREAMS, MAX_EVALUATIONS, QUICK_BUDGET_S, QUICK_EVALUATIONS
from gpusim.errors import OptionError
from gpusim.formats.hardware import HardwareModel
from gpusim.step import Step, as_step, load
from gpusim.text import short_value
from gpusim.trace.store import bundled_traces, load_trace, other_batches, read_manifest

if TYPE_CHECKING:
    from gpusim.analysis.transfer import Transfer


def transfer(
    steps: AnyStep | Iterable[AnyStep],
    *,
    hw: str | Path | HardwareModel | Iterable[str | Path | HardwareModel] | None = None,
    batch: int | Iterable[int] | None = None,
    streams: int = DEFAULT_STREAMS,
    evaluations: int = QUICK_EVALUATIONS,
    seed: int = DEFAULT_SEED,
    progress: Progress | None = None,
) -> Transfer:
    """Return the loss of schedules tuned for one batch or GPU on another.

    A schedule is tuned for each step on each model of `hw` (default: the step's own) and simulated on all of them.
    `batch` has the batches to compare: each must be that of a given step, or of a bundled trace of the same network;
    times are never scaled between batches. Each search ends after `evaluations` simulations, in whole
    batches.
    Raises `OptionError` for steps with different ops, a batch without a trace, and arguments out of their range.
    """
    from gpusim.analysis.as_imported import check_searchable
    from gpusim.analysis.transfer import transfer as run

    given = [as_step(steps)] if isinstance(steps, str | Path) or not isinstance(steps, Iterable) else list(steps)
    if not given:
        raise OptionError("no step to tune for", argument="steps", value=given)
    loaded = [as_step(step) for step in given]
    count = check_streams(streams)
    seed = check_seed(seed)
    evaluations = whole("evaluations", evaluations, 1, MAX_EVALUATIONS, f"a whole number from 1 to {MAX_EVALUATIONS:,}")
    if batch is not None:
        loaded = at_batches(loaded, [batch] if isinstance(batch, int) else list(batch))
    models = [None] if hw is None else [hw] if isinstance(hw, str | Path | HardwareModel) else list(hw)
    if not models:
        raise OptionError("no hardware model", argument="hw", value=hw)
    placed = [step if model is None else step.on(model) for step in loaded for model in models]
    names = [f"{step.name} on {step.hardware.name}" for step in placed]
    for number, (step, name) in enumerate(zip(placed, names, strict=True)):
        if name in names[:number]:
            by = short_value(step.hardware_file or step.file)
            raise OptionError(f"'{name}' is given twice, the second time by '{by}'")
    graphs = []
    for step in placed:
        check_searchable(step.trace)
        with step.naming():
            graphs.append(step.graph)
    return run(
        graphs,
        streams=count,
        budget_s=QUICK_BUDGET_S,
        evaluations=evaluations,
        seed=seed,
        report=progress or ignore,
    )


def at_batches(steps: list[Step], batches: list[int]) -> list[Step]:
    """Return the step of each batch: one of `steps`, or a bundled trace that differs only in the batch.

    Raises `OptionError` for a batch without a trace.
    """
    first = steps[0]
    known = {step.trace.model.batch: step for step in reversed(steps)}
    names = _bundled_batches(first)
    chosen = []
    for batch in batches:
        batch = whole("batch", batch, 1, None, "a whole number of at least 1")
        if batch not in known and batch not in names:
            model = first.trace.model
            there = ", ".join(map(str, sorted({*known, *names})))
            raise OptionError(
                f"there is no trace of {model.network}, {model.mode}, at that batch (there are: {there}); capture one: "
                f"gpusim capture {model.spec or 'SPEC'} --mode {model.mode} --batch {batch}",
                argument="batch",
                value=batch,
            )
        chosen.append(known[batch] if batch in known else load(names[batch], first.hardware))
    return chosen


def _bundled_batches(step: Step) -> dict[int, str]:
    """Return the names, by batch, of the bundled traces that differ from a step only in the batch."""
    known = bundled_traces()
    network = step.trace.model.network
    near = [entry["name"] for entry in read_manifest() if entry["network"] == network and entry["name"] in known]
    return other_batches(step.trace, {name: load_trace(name) for name in near})
