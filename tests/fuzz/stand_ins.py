"""Broken readers instead of gpusim's own, which the harness must detect."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from gpusim import step
from gpusim.errors import TraceError
from gpusim.trace import store

#: File of a case that names the fault of the reader of its trace.
FAULT = "fault"


def _faulty_reader() -> None:
    """Replace the reader of traces by one with the fault that the case asks for: one process serves all these cases."""
    real = store.load_trace

    def load_trace(name: str) -> Any:
        FAULTS[Path(FAULT).read_text()](name)
        return real(name)

    store.load_trace = step.load_trace = load_trace


def _raise(error: BaseException) -> Callable[[str], None]:
    def work(name: str) -> None:
        raise error

    return work


def _refuse(text: str) -> Callable[[str], None]:
    """Make a refusal whose text is neither escaped nor cut."""

    def work(name: str) -> None:
        click.echo(f"gpusim: trace.json: {text}", err=True)
        raise SystemExit(2)

    return work


def _markup(name: str) -> None:
    from rich.console import Console

    Console().print("[/red]")


def _loop(name: str) -> None:
    while True:
        time.sleep(0.01)


def _allocate(name: str) -> None:
    kept = [bytearray(os.urandom(1)) * 50_000_000 for _ in range(24)]
    time.sleep(0.2)
    del kept


def _allocate_all(name: str) -> None:
    kept = []
    while True:
        kept.append(b"x" * 50_000_000)
        time.sleep(0.01)


def _wrong_engine() -> None:
    """Slow the reference engine by 1 %."""
    import dataclasses

    from gpusim.engine.reference import ReferenceEngine

    real = ReferenceEngine.run

    def run(self: Any, plan: Any, hardware: Any) -> Any:
        found = real(self, plan, hardware)
        return dataclasses.replace(found, end_ns=tuple(round(1.01 * end) for end in found.end_ns))

    ReferenceEngine.run = run  # type: ignore[method-assign]


def _fast_engine() -> None:
    """Make both engines drop half of each kernel."""
    import dataclasses

    from gpusim.engine.fast import FastEngine
    from gpusim.engine.reference import ReferenceEngine

    for engine in (FastEngine, ReferenceEngine):

        def run(self: Any, plan: Any, hardware: Any, real: Any = engine.run) -> Any:
            found = real(self, plan, hardware)
            return dataclasses.replace(
                found, end_ns=tuple(s + (e - s) // 2 for s, e in zip(found.start_ns, found.end_ns, strict=True))
            )

        engine.run = run  # type: ignore[method-assign]


def _negative() -> None:
    from gpusim.cli import common

    common_print = common.print_json

    def print_json(document: Any) -> None:
        common_print(document | {"makespan_ns": -5} if isinstance(document, dict) else document)

    from gpusim.cli import simulation

    simulation.print_json = print_json  # type: ignore[attr-defined]


FAULTS: dict[str, Callable[[str], None]] = {
    "none": lambda name: None,
    "value error": _raise(ValueError("int too large")),
    "escape": lambda name: click.echo("\x1b[31mred"),
    "escape in a refusal": _refuse("value \x9b31m"),
    "markup": _markup,
    "markup taken": lambda name: click.echo("mk0"),
    "loop": _loop,
    "allocate": _allocate,
    "allocate all": _allocate_all,
    "memory error": _raise(MemoryError()),
    "die": lambda name: os.abort(),
    "long refusal": _refuse("a " * 3000),
    "long value": _refuse("found " + "a" * 300),
    "no name": _raise(TraceError("the file", "is wrong")),
    "file left": lambda name: Path(".out.json.x1").write_text("") and None,
    "exit 1": _raise(SystemExit(1)),
    "silent refusal": _raise(SystemExit(2)),
}
STAND_INS: dict[str, Callable[[], None]] = {
    "faulty reader": _faulty_reader,
    "engines differ": _wrong_engine,
    "below the bound": _fast_engine,
    "negative time": _negative,
}
