"""Files about several GPUs and memory: topologies, plans of gpusim, placements of autoparallel, memory plans."""

from __future__ import annotations

import functools
import random
from typing import Any

from gpusim.formats.hardware import default_hardware
from gpusim.formats.topology import load_topology
from gpusim.layerwise.fixed_plans import data_parallel, one_weird_trick
from gpusim.layerwise.from_trace import layers_of
from gpusim.layerwise.plans import to_document
from gpusim.memplan.plan import MemoryPlan
from gpusim.memplan.policies.base import Setting
from gpusim.memplan.policies.registry import MEMORY_POLICIES
from gpusim.memplan.storages import Storages
from gpusim.plan.graph import OpGraph
from tests.fuzz import bases
from tests.fuzz.bases import Document
from tests.fuzz.cases import Case
from tests.fuzz.mutate import change, changed, named, to_json
from tests.support.memory_steps import WITHOUT_VARIANTS

GPUS = 4
#: A step with layers that split.
NETWORK = -1


@functools.cache
def topologies() -> tuple[Document, ...]:
    """Return measured and unmeasured links within one node, and two nodes."""
    h200, p100 = (bases.plain(load_topology(name)) for name in ("h200", "p100"))
    link = h200["links"]["node"]
    two_nodes = h200 | {"nodes": 2, "gpus_per_node": 2, "links": {"node": link, "network": link}}
    return (h200, p100, two_nodes | {"curves": [curve for curve in h200["curves"] if curve["gpus"] <= 2]})


@functools.cache
def networks() -> tuple[Document, ...]:
    """Return the beginnings of steps with layers of many kinds."""
    begins = {
        "googlenet-train-b8": 10, "decoder_small-infer-b1-bf16": 40, "transformer_small-infer-b1": 30,
        "experts_small-infer-b2": 40, "unet_small-infer-b2": 30,
    }  # fmt: skip
    return (*(bases.beginning(name, count) for name, count in begins.items()), bases.training_trace())


@functools.cache
def parallel_plans() -> tuple[Document, ...]:
    """Return two plans of gpusim, and autoparallel's two kinds of file."""
    graph = layers_of(bases.as_trace(bases.traces()[NETWORK])).for_gpus(GPUS)
    placements = {"version": 1, "mesh_shape": [2, 2], "placements": {"convolution": "S(0)S(0)", "convolution_1": "RR"}}
    node = {"name": "a", "op": "aten.convolution.default", "phase": "forward", "placement": "S(1)", "shape": [8, 8]}
    path = next((layer.path for layer in graph.layers if layer.kind == "convolution"), "net.conv")
    sharding = {"mesh": {"shape": [GPUS]}, "nodes": [node | {"module_path": path}, node | {"name": "b"}]}
    plans = (to_document(graph, GPUS, made(graph, GPUS), "m") for made in (data_parallel, one_weird_trick))
    return (*map(bases.plain, plans), placements, sharding)


@functools.cache
def memory_plans() -> tuple[Document, ...]:
    """Return a plan of each memory policy for `bases.training_trace`, and one with several streams."""
    trace = bases.as_trace(bases.training_trace())
    graph = OpGraph.build(trace, default_hardware(trace.provenance.gpu.name))
    setting = Setting(graph, Storages.of(trace))
    plans = [MEMORY_POLICIES[name](setting).made(name, "test") for name in WITHOUT_VARIANTS]
    everything = range(len(trace.ops))
    plans.append(MemoryPlan(order=tuple(everything), op_streams=tuple(op % 2 for op in everything), held=(0, 1)))
    documents = [bases.plain(plan.to_document(trace)) for plan in plans]
    return tuple(document for place, document in enumerate(documents) if document not in documents[:place])


def layers_case(rng: random.Random) -> Case:
    """A step whose operators have other arguments or names, or with any change."""
    if rng.random() < 0.3:
        data, what = changed(rng.choice(networks()), rng.choice(networks()), rng)
    else:
        document, said = bases.fresh(rng.choice(networks())), []
        for _ in range(rng.choice((1, 1, 2, 3))):
            op, other = rng.choice(document["ops"]), rng.choice(rng.choice(networks())["ops"])
            if rng.random() < 0.3:
                op["target"] = other["target"]
                said.append(f"{op['name']}: {op['target']}")
            else:
                arguments = op.setdefault("args", [])
                said.append(f"{op['name']}: {change(arguments, bases.fresh(other.get('args', [])), rng)}")
        data, what = to_json(document), "; ".join(said)
    name, data = named("trace", data, rng)
    more = rng.choice((("--json",), ("--memory", "1GiB", "--by", "additive"), ("--batch-norm", "synchronised")))
    return Case("layers", ("parallel", name, "--gpus", str(rng.choice((2, 4))), *more), {name: data}, (name,), (), what)


def topology_case(rng: random.Random) -> Case:
    data, what = changed(rng.choice(topologies()), rng.choice(topologies()), rng)
    name, data = named("topology", data, rng)
    return _parallel_case("topology", ("--topology", name), name, data, what, rng)


def parallel_plan_case(rng: random.Random) -> Case:
    data, what = changed(rng.choice(parallel_plans()), rng.choice(parallel_plans()), rng)
    name, data = named("plan", data, rng)
    return _parallel_case("parallel_plan", ("--plan", name), name, data, what, rng)


def _parallel_case(family: str, words: tuple[str, ...], name: str, data: bytes, what: str, rng: random.Random) -> Case:
    more = rng.choice((("--json",), ("--json",), (), ("-o", "out.json"), ("--html", "out.html")))
    argv = ("parallel", "trace.json", "--gpus", str(GPUS), *words, *more)
    return Case(family, argv, {"trace.json": to_json(bases.traces()[NETWORK]), name: data}, (name,), more[1:], what)


def memory_plan_case(rng: random.Random) -> Case:
    data, what = changed(rng.choice(memory_plans()), rng.choice(memory_plans()), rng)
    name, data = named("plan", data, rng)
    simulate = ("simulate", "trace.json", "--schedule", name)
    argv, outputs = rng.choice(
        (
            ((*simulate, "--json"), ()),
            (simulate, ()),
            ((*simulate, "--perfetto", "out.json"), ("out.json",)),
            (("explain", "trace.json", "--schedule", name), ()),
            (("@memory_plan", name), ()),
        )
    )
    files: dict[str, Any] = {"trace.json": to_json(bases.training_trace()), name: data}
    return Case("memory_plan", argv, files, (name,), outputs, what)
