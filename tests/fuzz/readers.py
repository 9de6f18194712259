"""Readers as commands that no command calls, or only on a GPU: `python -m tests.fuzz.readers @NAME FILE`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from gpusim.cli import main
from gpusim.errors import GpusimError


def _upload(name: str) -> None:
    from gpusim.importers.upload import parse_upload

    parse_upload(Path(name).read_bytes(), name)


def _measured(name: str, trace: str = "trace.json") -> None:
    from gpusim.report.measured import parse_measured
    from gpusim.trace.store import load_trace

    parse_measured(Path(name).read_bytes(), name, load_trace(trace))


def _measured_upload(name: str, trace: str = "trace.json") -> None:
    from gpusim.report.measured import parse_measured_upload
    from gpusim.trace.store import load_trace

    parse_measured_upload(Path(name).read_bytes(), name, load_trace(trace))


def _results(name: str) -> None:
    from gpusim.formats.results import read_results
    from gpusim.validation.tables import print_results

    print_results(read_results(Path(name)))


def _pairs(name: str) -> None:
    from gpusim.validation.pair_results import pairs_markdown, read_pairs

    pairs_markdown(read_pairs(Path(name)), name)


def _rules(name: str) -> None:
    from gpusim.formats.rules import read_rules

    read_rules(Path(name))


def _replayed(name: str) -> None:
    from gpusim.validation.replayed import read_replayed

    read_replayed(Path(name))


def _hyper_q(name: str) -> None:
    from gpusim.formats.hyper_q import read_hyper_q

    read_hyper_q(Path(name))


def _memory_plan(name: str, trace: str = "trace.json") -> None:
    """Read a memory plan as `replay --memory-plan` does before it needs a GPU."""
    from gpusim.api.predict import load_memory_plan
    from gpusim.step import load

    load_memory_plan(load(trace), name)


def _predictions(name: str, trace: str = "trace.json") -> None:
    """Read predictions as the stage `measure` does before it needs a GPU."""
    from gpusim.plan.graph import OpGraph
    from gpusim.trace.store import read_trace
    from gpusim.validation.chosen import hardware_of
    from gpusim.validation.predictions import read_predictions

    step = read_trace(Path(trace))
    read_predictions(Path(name), Path(trace)).chosen(OpGraph.build(step, hardware_of(step)), name)


def _memory_predictions(name: str, trace: str = "trace.json") -> None:
    """Read memory predictions as the stage `measure` does before it needs a GPU."""
    from gpusim.memplan.plan import MemoryPlan
    from gpusim.trace.store import read_trace
    from gpusim.validation.memory_stages import read_memory_predictions

    step = read_trace(Path(trace))
    for each in read_memory_predictions(Path(name), Path(trace)).plans:
        MemoryPlan.from_document(each.plan, step, name)


def _trials(name: str) -> None:
    from gpusim.validation.trials import read_trials
    from tests.fuzz.stages import tried

    read_trials(Path(name), tried())


def _operators(name: str) -> None:
    """Run replay's checks before it needs a GPU: operators of a trace, then their lookup in torch."""
    sys.modules.pop("torch", None) if sys.modules.get("torch", ...) is None else None
    import torch

    from gpusim.gpu.replay.allowlist import check_operators
    from gpusim.gpu.replay.operators import resolve
    from gpusim.trace.store import load_trace

    step = load_trace(name)
    check_operators(step, name)
    for index, op in enumerate(step.ops):
        try:
            found = resolve(op.target)
        except GpusimError as error:
            raise GpusimError(f"{name}: $.ops[{index}]: {error}") from error
        if not isinstance(found, torch._ops.OpOverload):
            raise AssertionError(f"$.ops[{index}].target: {op.target!r} is {type(found)}, which is no operator")


def _arguments(name: str) -> None:
    """Run replay's checks before it needs a GPU: operators, arguments, schemas, sizes of results."""
    _operators(name)
    import torch

    from gpusim.gpu.replay.operators import check_schemas, resolve
    from gpusim.gpu.replay.result_sizes import check_result_sizes
    from gpusim.gpu.replay.saved import ordered_inputs
    from gpusim.trace.store import load_trace

    step = load_trace(name)
    ordered_inputs(step)
    try:
        check_schemas(step)
        check_result_sizes(step, [resolve(op.target) for op in step.ops], torch.device("cuda", 0))
    except GpusimError as error:
        raise GpusimError(f"{name}: {error}") from error


READERS: dict[str, Callable[..., None]] = {
    "@upload": _upload,
    "@measured": _measured,
    "@results": _results,
    "@pairs": _pairs,
    "@rules": _rules,
    "@replayed": _replayed,
    "@measured_upload": _measured_upload,
    "@hyper_q": _hyper_q,
    "@memory_plan": _memory_plan,
    "@predictions": _predictions,
    "@memory_predictions": _memory_predictions,
    "@trials": _trials,
    "@operators": _operators,
    "@arguments": _arguments,
}


def run(argv: tuple[str, ...]) -> None:
    """Run the command line, or a reader with the command line's refusals. Raises `SystemExit` as that does."""
    if argv[0] not in READERS:
        sys.argv = ["gpusim", *argv]
        main()
        return

    def refuse() -> None:
        READERS[argv[0]](*argv[1:])

    _as_command(refuse)


def _as_command(work: Callable[[], None]) -> None:
    """Run `work` as `main` runs a command, so that errors are printed alike."""
    import click

    import gpusim.cli as module

    kept, sys.argv = module.cli, ["gpusim"]
    module.cli = click.Command("gpusim", callback=work)  # type: ignore[assignment]
    try:
        main()
    finally:
        module.cli = kept


if __name__ == "__main__":
    run(tuple(sys.argv[1:]))
