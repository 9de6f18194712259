"""Files about several GPUs: topologies, plans of gpusim, placements of autoparallel."""

from __future__ import annotations

import functools
import random

from gpusim.formats.topology import load_topology
from gpusim.layerwise.fixed_plans import data_parallel, one_weird_trick
from gpusim.layerwise.from_trace import layers_of
from gpusim.layerwise.plans import to_document
from tests.fuzz import bases
from tests.fuzz.bases import Document
from tests.fuzz.cases import Case
from tests.fuzz.mutate import change, changed, named, to_json

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
