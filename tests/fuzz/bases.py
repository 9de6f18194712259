"""Valid documents to mutate: small ones, made by the tests' own helpers or cut from bundled files."""

from __future__ import annotations

import functools
import json
import pickle
import sqlite3
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from gpusim.formats.measurement import SCHEMA as MEASUREMENT_SCHEMA
from gpusim.formats.measurement import Measurement, OutputCheck
from gpusim.formats.results import SCHEMA as RESULTS_SCHEMA
from gpusim.formats.schedule import Partition
from gpusim.formats.sweep import Sweep
from gpusim.formats.trace import Counters, Timing, Trace, Variant, VariantSettings
from gpusim.io.resources import resource_dir
from gpusim.memplan.compare import compare_policies
from gpusim.memplan.evaluate import MemoryEvaluator
from gpusim.memplan.plan import MemoryPlan
from gpusim.memplan.snapshot import snapshot_document
from gpusim.memplan.storages import Storages
from gpusim.plan.schedule import Schedule
from gpusim.sweep.grid import build_grid
from gpusim.sweep.point import compute
from gpusim.sweep.run import run_sweep
from gpusim.sweep.store import Store
from gpusim.trace.store import load_trace, structure_hash, write_trace
from tests.support.helpers import (
    Step,
    chain_trace,
    in_place,
    kernel,
    make_trace,
    memset,
    op,
    schedule_of,
    view,
    wide_trace,
)
from tests.support.made_results import case, make_results
from tests.support.memory_steps import chain_step, graph_of

Document = dict[str, Any]


def plain(value: Any) -> Any:
    """Convert a Struct to dictionaries and lists."""
    return json.loads(msgspec.json.encode(value))


def _rich_trace() -> Trace:
    """Views, changes in place, random operators, memsets, clusters, counters, and variants of two ops."""
    replace_fields = msgspec.structs.replace
    counted = Counters(dram_bytes=10_000, l2_bytes=20_000, instructions=1000, tensor_instructions=0)
    special = replace_fields(
        kernel(2000, 132, 256, 64, 1024), cluster=(2, 1, 1), counters=counted, lo_ns=1900, hi_ns=2100
    )
    steps = [
        op("a", "x", dur_ns=3000, blocks=132),
        view("v", "a"),
        in_place("i", "v", "y", dur_ns=1500),
        Step("r", "v", "r", kernels=(special, memset(500)), random=True, host_ns=3000, target="aten.rand_like.default"),
        op("b", "a", dur_ns=4000, blocks=264),
        op("c", "r b", dur_ns=1000),
    ]
    trace = make_trace(steps, outputs="c", eager_ns=60_000, graph_ns=20_000)
    fast = Variant(name="benchmark", settings=VariantSettings(benchmark=True), kernels=(kernel(2500, 132),))
    slow = Variant(name="native", settings=VariantSettings(cudnn=False), kernels=(kernel(5000, 264), kernel(100)))
    ops = tuple(replace_fields(o, variants=(fast, slow)) if o.name in ("a", "b") else o for o in trace.ops)
    return replace_fields(trace, ops=ops)


def training_trace() -> Document:
    """A step with memory to plan for."""
    return plain(chain_step(3))  # type: ignore[no-any-return]


@functools.cache
def memory_plans() -> tuple[tuple[Document, Document], ...]:
    """Return memory plans with their traces: copies, barriers and variants; recomputation; an order, streams."""
    trace = chain_step(3, target="aten.convolution.default")
    variants = tuple(
        Variant(name=name, settings=VariantSettings(cudnn=False), kernels=(kernel(5000),), workspace_bytes=n)
        for n, name in enumerate(("native", "other"))
    )
    ops = tuple(msgspec.structs.replace(o, variants=variants, workspace_bytes=1 << 20) for o in trace.ops)
    trace = msgspec.structs.replace(trace, ops=ops)
    names = ("vdnn_all_m", "torch_budget", "least_time", "olla")
    comparison = compare_policies(graph_of(trace), policies=names)
    plans = [comparison.plan(name) for name in names]
    plans.append(replace(plans[-1], op_streams=tuple(n % 2 for n in range(len(ops)))))
    return tuple((plain(trace), plain(plan.to_document(trace))) for plan in plans)


@functools.cache
def memory_snapshot() -> Document:
    """Return the snapshot of that step, as PyTorch would record it."""
    trace = chain_step(3)
    outcome = MemoryEvaluator(graph_of(trace)).evaluate(MemoryPlan())
    return plain(snapshot_document(Storages.of(trace), outcome))  # type: ignore[no-any-return]


def beginning(name: str, count: int) -> Document:
    """Return the first `count` ops of a bundled trace, with the tensors and storages that they refer to."""
    document: Document = plain(load_trace(name))
    document["ops"] = document["ops"][:count]
    used = sorted(_tensors(document["ops"]))
    number = {old: new for new, old in enumerate(used)}
    document["ops"] = [_renumbered(o, number) for o in document["ops"]]
    tensors = [document["tensors"][old] for old in used]
    storages = sorted({tensor["storage"] for tensor in tensors})
    document["storages"] = [document["storages"][old] for old in storages]
    document["tensors"] = [tensor | {"storage": storages.index(tensor["storage"])} for tensor in tensors]
    return document


def _tensors(ops: Sequence[Document]) -> set[int]:
    found: set[int] = set()
    for o in ops:
        for field in ("outputs", "reads", "writes"):
            found |= {tensor for tensor in o.get(field, ()) if tensor is not None}
        found |= _mentioned([o.get("args", []), o.get("kwargs", {})])
    return found


def _mentioned(value: Any) -> set[int]:
    if isinstance(value, dict) and set(value) == {"tensor"}:
        return {value["tensor"]}
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return set().union(*map(_mentioned, parts))


def _renumbered(o: Document, number: dict[int, int]) -> Document:
    def walk(value: Any) -> Any:
        if isinstance(value, dict):
            return (
                {"tensor": number[value["tensor"]]}
                if set(value) == {"tensor"}
                else {k: walk(v) for k, v in value.items()}
            )
        return [walk(part) for part in value] if isinstance(value, list) else value

    done = o | {"args": walk(o.get("args", [])), "kwargs": walk(o.get("kwargs", {}))}
    for field in ("outputs", "reads", "writes"):
        if field in o:
            done[field] = [None if tensor is None else number[tensor] for tensor in o[field]]
    return done


@functools.cache
def traces() -> tuple[Document, ...]:
    """Small traces; the last two have real operators."""
    made = (
        wide_trace(2, depth=1, eager_ns=100_000, graph_ns=50_000),
        chain_trace(4),
        wide_trace(3, blocks=132),
        _rich_trace(),
    )
    return (
        *(plain(trace) for trace in made),
        beginning("squeezenet1_1-infer-b1", 8),
        beginning("googlenet-train-b8", 10),
    )


def as_trace(document: Document) -> Trace:
    return msgspec.convert(document, Trace)


@functools.cache
def schedules() -> tuple[tuple[Document, Document], ...]:
    """Return pairs of a trace and its schedule: one stream, several, variants, partitions."""
    found = []
    for document in traces():
        trace = as_trace(document)
        order = range(len(trace.ops))
        variants = [int(bool(o.variants)) for o in trace.ops]
        streams = [i % 3 for i in order]
        parts = (Partition(sms=64, streams=(0,)), Partition(sms=68, streams=(1, 2)))
        for made in (
            Schedule.in_recorded_order(len(order)).made("sequential", "test", 1000),
            schedule_of(order, streams, policy="p", made_by="test", variants=variants),
            schedule_of(order, streams, policy="p", made_by="test", partitions=parts),
        ):
            found.append((document, plain(made.to_document(trace))))
    return tuple(found)


@functools.cache
def hardware() -> tuple[Document, ...]:
    return tuple(
        json.loads((resource_dir("hwmodels") / f"{name}.json").read_bytes()) for name in ("h200", "k40", "a100-80gb")
    )


@functools.cache
def measurements() -> tuple[tuple[Document, Document], ...]:
    """Return pairs of a trace and its measurement."""
    found = []
    for document in traces():
        trace = as_trace(document)
        timing = Timing(median_ns=20_000, lo_ns=19_000, hi_ns=21_000, rounds=10)
        outputs = OutputCheck(
            equal=True,
            bit_equal=True,
            sequential_repeats=True,
            worst_error=0.0,
            sequential_error=0.0,
            tolerance=1e-3,
            compared=1,
        )
        made = Measurement(
            schema=MEASUREMENT_SCHEMA, trace=trace.name, trace_hash=structure_hash(trace), policy="wavefront",
            streams=2,
            schedule=timing, sequential=timing, predicted_ns=20_500, predicted_sequential_ns=20_500, hardware="h200",
            outputs=outputs, peak_bytes=1000, sequential_peak_bytes=1000, events=1, gpu=trace.provenance.gpu,
            date="2026-01-01", command="test",
        )  # fmt: skip
        found.append((document, plain(made)))
    return tuple(found)


@functools.cache
def timelines() -> tuple[tuple[Document, Document], ...]:
    """Return pairs of a trace and a profiler's file: gpusim's own, and a foreign one."""
    found = []
    for document, measurement in measurements():
        kernels = [
            {"ph": "X", "cat": "kernel", "name": f"k{i}", "ts": 10.0 * i, "dur": 8.5, "pid": 1, "tid": 7 + i % 2,
             "args": {"stream": 7 + i % 2, "device": 0, "correlation": 5}}
            for i in range(4)
        ]  # fmt: skip
        named = {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "measured (profiled replay): wavefront"}}
        other = {
            "producer": "gpusim",
            "trace": measurement["trace"],
            "hardware": "h200",
            "measurement": json.dumps(measurement),
        }
        found.append((document, {"traceEvents": kernels}))
        found.append((document, {"schemaVersion": 1, "otherData": other, "traceEvents": [named, *kernels]}))
    return tuple(found)


@functools.cache
def results() -> tuple[Document, ...]:
    made = plain(make_results([case(1000, 1100), case(900, 1000, trace="b-train-b8", streams=2)]))
    return (made, _shortened(json.loads(_results_file(RESULTS_SCHEMA))))


@functools.cache
def pairs() -> tuple[Document, ...]:
    return (_shortened(json.loads(next(resource_dir("validate/results").glob("*.pairs.json")).read_bytes())),)


@functools.cache
def rules() -> tuple[Document, ...]:
    folder = Path(__file__).parents[2] / "research" / "data"
    return (_shortened(json.loads(next(folder.glob("rules_*.json")).read_bytes())),)


@functools.cache
def hyper_q() -> tuple[Document, ...]:
    folder = Path(__file__).parents[1] / "data"
    return (_shortened(json.loads(next(folder.glob("hyper_q_*.json")).read_bytes())),)


@functools.cache
def replayed() -> tuple[Document, ...]:
    made = {
        "trace": "tiny-infer-b1", "trace_hash": "0" * 32, "policy": "p", "order": [0, 1, 2], "stream_of": [0, 1, 0],
        "variants": [0, 1, 0], "partitions": [{"sms": 64, "streams": [0]}], "measured_ns": 1000, "sequential_ns": 2000,
    }  # fmt: skip
    return ({"schema": "gpusim-replayed/1", "schedules": [made, made | {"variants": [], "partitions": []}]},)


def _results_file(schema: str) -> bytes:
    for path in sorted(resource_dir("validate/results").glob("*.json")):
        if schema.encode() in path.read_bytes()[:200]:
            return path.read_bytes()
    raise AssertionError(f"no bundled file of {schema}")


def _shortened(value: Any) -> Any:
    """Cut lists of objects to three."""
    if isinstance(value, dict):
        return {key: _shortened(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_shortened(part) for part in (value[:3] if value and isinstance(value[0], dict) else value)]
    return value


RECIPES: tuple[Document, ...] = (
    {
        "name": "small", "policies": ["wavefront", "search"], "streams": 4, "budget_s": 0.05, "counts": [2, 4],
        "random": 2,
        "case": [
            {"spec": "m.py:a", "mode": "infer", "batch": 1},
            {"spec": "torchvision:vgg16", "mode": "train", "batch": 8, "dtype": "bf16",
            "memory_format": "channels_last"},
        ],
    },
    {
        "name": "given", "pairs": 3, "measure": 2, "recordings": 3, "partitions": "64+68", "seed": 1, "traces": "kept",
        "case": [{"trace": "trace.json", "variants": True}, {"trace": "googlenet-infer-b1", "fitted": True}],
    },
)  # fmt: skip

SWEEPS: tuple[Document, ...] = (
    {"traces": ["trace.json"], "hardware": ["h200"], "policies": ["sequential", "wavefront"], "streams": [2],
    "engine": "fast", "seed": 0},
    {"traces": ["trace.json"], "policies": ["critical_path"], "streams": [1, 2], "engine": "reference"},
)  # fmt: skip


class InThisProcess:
    """Workers of a sweep that compute in this process."""

    description = "this process"

    def __init__(self, count: int = 1) -> None:
        self.count = count

    def run(self, grid: Any, points: Sequence[Any]) -> Any:
        contents = grid.contents
        for point in points:
            yield [compute(point, contents[point.trace_hash], contents[point.hardware_hash], grid.version)]


@functools.cache
def store() -> bytes:
    """Return a sweep's store of four rows, one with an error."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        write_trace(wide_trace(2, depth=1), path)
        sweep = Sweep(traces=(str(path),), policies=("sequential", "wavefront"), hardware=("h200", "k40"), streams=(2,))
        target = Path(folder) / "s.sqlite"
        grid = build_grid(sweep)
        with Store(target) as opened:
            run_sweep(grid, opened, InThisProcess())
            (row, *_) = opened.rows()
            empty = dict.fromkeys(("makespan_ns", "sequential_ns", "speedup", "peak_bytes"))
            opened.add([replace(row, key="failed", error="its worker process died", **empty)])
        with sqlite3.connect(target) as connection:
            connection.execute("UPDATE points SET seconds = 0.5, worker = 'host:1'")
        connection.close()
        return target.read_bytes()


def fresh(document: Document) -> Document:
    """Copy a document for mutation."""
    done: Document = pickle.loads(pickle.dumps(document))  # several times as fast as copy.deepcopy
    return done
