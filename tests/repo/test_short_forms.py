"""The `repr` and the table of every public value, and of what it holds: short and clean, whatever a file says."""

from __future__ import annotations

import dataclasses
import html
import inspect
import re
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any

import msgspec
import pytest

import gpusim
from gpusim.errors import GpusimError
from gpusim.formats.hardware import load_hardware
from gpusim.formats.topology import load_topology
from gpusim.formats.trace import Trace
from gpusim.text import visible
from gpusim.trace.store import load_trace
from tests.io.test_text import is_clean
from tests.report.test_measured import measurement_of
from tests.support.helpers import wide_trace
from tests.support.memory_steps import chain_step

PLAIN = "plain"
HOSTILE = "<script>alert(1)</script>\x1b[31m\u202e" + "x" * 500
#: Classes of the public API that are values.
VALUES = {
    name
    for name in gpusim.__all__
    if inspect.isclass(getattr(gpusim, name)) and not issubclass(getattr(gpusim, name), GpusimError)
}
#: Depth to which values inside values are looked at, and how many of each collection.
DEPTH, SOME = 5, 3


def named(trace: Trace, name: str) -> Trace:
    """Return the trace with the name everywhere that a name can be."""
    ops = tuple(
        msgspec.structs.replace(
            op,
            name=f"{name}{index}",
            layer=name,
            kernels=tuple(msgspec.structs.replace(each, name=name) for each in op.kernels),
        )
        for index, op in enumerate(trace.ops)
    )
    gpu = msgspec.structs.replace(trace.provenance.gpu, driver=name, torch=name)
    provenance = msgspec.structs.replace(trace.provenance, gpu=gpu, command=name, date=name)
    model = msgspec.structs.replace(trace.model, network=name, spec=name)
    return msgspec.structs.replace(trace, ops=ops, provenance=provenance, model=model)


@pytest.fixture(scope="module", params=[PLAIN, HOSTILE], ids=["plain", "hostile"])
def values(request: pytest.FixtureRequest) -> list[Any]:
    """Return public values, at least one of each class."""
    name: str = request.param
    hardware = msgspec.structs.replace(load_hardware("h200"), name=name, gpu=name)
    other = msgspec.structs.replace(load_hardware("a100-80gb"), name=f"{name}2")
    step = gpusim.load(named(wide_trace(eager_ns=400_000, graph_ns=130_000), name), hw=hardware)
    best = gpusim.explore(step, evaluations=20)
    trained = gpusim.memory(gpusim.load(named(chain_step(), name), hw=hardware))
    assert trained.best is not None
    layers = load_trace("squeezenet1_1-infer-b1")
    layers = msgspec.structs.replace(layers, model=msgspec.structs.replace(layers.model, network=name, spec=name))
    topology = msgspec.structs.replace(load_topology("h200"), name=name)
    measurement = msgspec.structs.replace(measurement_of(step.trace), policy=name, hardware=name, command=name)
    return [
        step,
        step.trace,
        step.hardware,
        best,
        dataclasses.replace(best.schedule, policy=name),
        best.verdict,
        best.bounds,
        best.timeline,
        gpusim.simulate(step),
        gpusim.explain(step),
        gpusim.limits(step),
        gpusim.whatif(step, sms=66),
        gpusim.transfer(step, hw=[hardware, other], evaluations=5),
        trained,
        dataclasses.replace(trained.plan(), policy=name),
        gpusim.parallel(gpusim.load(layers, hw=hardware), gpus=2, topology=topology),
        topology,
        measurement,
    ]


def test_every_value_is_short_in_a_terminal_and_a_table_in_a_notebook(values: list[Any]) -> None:
    assert {type(value).__name__ for value in values} == VALUES
    for value in values:
        text = repr(value)
        assert text.startswith(f"<{type(value).__name__} "), text
        assert text.endswith(">")
        assert len(text) < 200
        assert is_clean(text)
        table = value._repr_html_()
        assert table.count("<table>") == table.count("</table>") == 1
        assert len(table) < 20_000
        assert is_clean(table)
        assert "<script>" not in table


def test_names_from_files_are_text_in_notebooks(values: list[Any]) -> None:
    step = values[0]
    assert html.escape(step.trace.model.network[:20]) in step._repr_html_()


def test_a_verdict_is_whole_in_a_notebook(values: list[Any]) -> None:
    """Its last sentence may be a warning, so no long name and no length of its own hides it."""
    best = values[3]
    whole = html.escape(visible(best.verdict.sentence))
    assert len(best.verdict.sentence) > 200
    assert f"{whole}</strong>" in best._repr_html_()
    assert f"<strong>{whole}</strong>" in best.verdict._repr_html_()


def inside(value: Any, place: str, depth: int) -> Iterator[tuple[str, Any]]:
    """Yield the values of gpusim that a value holds or computes, with their places."""
    if isinstance(value, list | tuple):
        for part in value[:SOME]:
            yield from inside(part, f"{place}[]", depth)
    elif isinstance(value, dict):
        for part in list(value.values())[:SOME]:
            yield from inside(part, f"{place}{{}}", depth)
    elif type(value).__module__.startswith("gpusim.") and not isinstance(value, type | Callable):  # type: ignore[arg-type]
        yield place, value
        for name in fields_of(value) if depth else ():
            try:
                part = getattr(value, name)
            except GpusimError:  # a property that does not hold for this value
                continue
            yield from inside(part, f"{place}.{name}", depth - 1)


def fields_of(value: Any) -> list[str]:
    """Return the public fields and properties of a value."""
    names = [each.name for each in dataclasses.fields(value)] if dataclasses.is_dataclass(value) else []
    names += getattr(value, "__struct_fields__", ())
    names += [n for n, each in inspect.getmembers(type(value)) if isinstance(each, property | cached_property)]
    return [name for name in names if not name.startswith("_")]


def test_values_inside_the_public_ones_are_short_too(values: list[Any]) -> None:
    """A long one would fill a terminal: 5 MB for the causes of a timeline, 170 KB for a row of memory plans."""
    seen: dict[type, str] = {}
    for value in values:
        for place, part in inside(value, type(value).__name__, DEPTH):
            text = repr(part)
            assert len(text) < 200, f"{place}: {len(text)} characters: {text[:100]}"
            assert is_clean(text), place
            seen[type(part)] = place
    assert len(seen) > 40


def test_representations_say_what_a_reader_asks_first() -> None:
    step = gpusim.load("googlenet-train-b8")
    assert repr(step) == "<Step googlenet-train-b8 on h200: 674 ops, 842 kernels>"
    best = gpusim.explore("googlenet-infer-b1", evaluations=1)
    assert re.fullmatch(r"<Explored googlenet-infer-b1 on h200: 1\.\d\dx with \d streams, worth it>", repr(best))
    assert str(best.verdict).startswith("Worth it: ")
    assert repr(best.best).startswith(f"<Row policy='{best.best.policy}', streams={best.best.streams}, makespan_ns=")
