"""Changed topologies, plans and placements of autoparallel are read, or refused with the file in one short line."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gpusim.errors import GpusimError
from gpusim.formats.topology import check_gpus, load_topology
from gpusim.layerwise.communication import members, time_ns
from gpusim.layerwise.configs import check_config
from gpusim.layerwise.fixed_plans import one_weird_trick
from gpusim.layerwise.plans import plan_reader, to_document
from gpusim.text import visible
from tests.fuzz.mutate import change, to_json
from tests.support.layer_networks import chain

GPUS, CASES = 4, 150
GRAPH = chain(2).for_gpus(GPUS)
PLACEMENTS = {"version": 1, "mesh_shape": [2, 2], "placements": {"convolution": "S(0)S(0)", "addmm": "RR"}}
NODE = {"name": "a", "op": "aten.addmm.default", "phase": "forward", "placement": "S(1)", "shape": [8, 8]}
DOCUMENTS: dict[str, Any] = {
    "topology": msgspec.to_builtins(load_topology("h200")),
    "plan": msgspec.to_builtins(to_document(GRAPH, GPUS, one_weird_trick(GRAPH, GPUS), "owt")),
    "solution": PLACEMENTS,
    "sharding": {"mesh": {"shape": [GPUS]}, "nodes": [NODE | {"module_path": "net.fc2"}, NODE | {"name": "b"}]},
}


@pytest.mark.parametrize("kind", DOCUMENTS)
def test_a_changed_file_is_read_or_refused_in_one_line_that_names_it(kind: str, tmp_path: Path) -> None:
    refused = 0
    file = tmp_path / "changed.json"
    for case in range(CASES):
        rng = random.Random(f"{kind} {case}")
        document = copy.deepcopy(DOCUMENTS[kind])
        what = [change(document, DOCUMENTS[rng.choice(list(DOCUMENTS))], rng) for _ in range(rng.randint(1, 2))]
        file.write_bytes(to_json(document))
        try:
            use(kind, file)
        except GpusimError as error:
            refused += 1
            line = str(error)
            assert str(file) in line, what
            assert line == visible(line), what
            assert len(line) < 2000, what
    assert 0 < refused < CASES


def use(kind: str, file: Path) -> None:
    """Read the file as `gpusim parallel` does; what is read makes sense."""
    if kind == "topology":
        topology = load_topology(str(file))
        check_gpus(topology, GPUS, str(file))
        assert 0 < time_ns(topology, "all_reduce", 2.0**20, members(range(GPUS), topology.gpus_per_node)) < float("inf")
        return
    choice = plan_reader(file, GPUS)(GRAPH).choice
    for layer, config in zip(GRAPH.layers, choice, strict=True):
        check_config(layer, config, GPUS)
