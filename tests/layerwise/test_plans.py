"""Plans as documents, DTensor's placements of them, and autoparallel's placements."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gpusim.errors import ParallelPlanError
from gpusim.formats.parallel_plan import read_plan, write_plan
from gpusim.layerwise.autoparallel import import_autoparallel
from gpusim.layerwise.configs import REPLICATED, Config
from gpusim.layerwise.dtensor import export_dtensor
from gpusim.layerwise.fixed_plans import data_parallel, model_parallel, one_weird_trick
from gpusim.layerwise.plans import from_document, plan_reader, plan_readers, to_document
from tests.support.layer_networks import chain, small_cnn, tables

NETWORKS = tables()
GRAPH = chain(2).for_gpus(4)


def plan_file(folder: Path, *layers: dict[str, Any], **changes: Any) -> Path:
    document = {"schema": "gpusim-parallel-plan/1", "network": "chain", "gpus": 4, "layers": list(layers), **changes}
    file = folder / "plan.json"
    file.write_text(json.dumps(document))
    return file


def test_a_plan_survives_its_file(tmp_path: Path) -> None:
    choice = one_weird_trick(GRAPH, 4)
    file = tmp_path / "plan.json.gz"
    write_plan(file, to_document(GRAPH, 4, choice, "owt"))
    assert from_document(read_plan(file), GRAPH, str(file)) == choice


def test_a_layer_that_is_not_listed_is_split_by_samples(tmp_path: Path) -> None:
    file = plan_file(tmp_path, {"name": "fc1", "c": 4})
    choice = plan_reader(file, 4)(GRAPH).choice
    assert {layer.name: config for layer, config in zip(GRAPH.layers, choice, strict=True)} == {
        **{layer.name: Config(n=4) for layer in GRAPH.layers},
        "fc1": Config(c=4),
    }


@pytest.mark.parametrize(
    ("layers", "words"),
    [
        ([{"name": "conv9", "n": 2}], r"\$.layers\[0\]: chain has no layer 'conv9'"),
        ([{"name": "fc1", "c": 2}, {"name": "fc1", "c": 4}], r"\$.layers\[1\]: layer 'fc1' comes twice"),
        ([{"name": "conv0", "n": 3}], "n=3 does not divide its 8 samples"),
        ([{"name": "fc1", "h": 2}], "a linear layer is split by n, c"),
        ([{"name": "conv0", "h": 4, "replicated": True}], "layer 'conv0' is replicated, and split by h=4"),
        ([{"name": "conv0", "n": 0}], r"\$.layers\[0\].n"),
        ([{"name": "conv0", "depth": 2}], "depth"),
        ([{"name": "\x1b[31m", "n": 2}], r"no layer '\\x1b\[31m'"),
    ],
)
def test_a_plan_that_does_not_fit_is_refused_with_file_and_place(tmp_path: Path, layers: list, words: str) -> None:
    file = plan_file(tmp_path, *layers)
    with pytest.raises(ParallelPlanError, match=words) as error:
        plan_reader(file, 4)(GRAPH)
    assert str(file) in str(error.value)


def test_a_plan_for_other_gpus_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ParallelPlanError, match=r"is for 2 GPUs, not 4"):
        plan_reader(plan_file(tmp_path, gpus=2), 4)(GRAPH)


def test_a_plan_for_another_network_is_said(tmp_path: Path) -> None:
    assert plan_reader(plan_file(tmp_path), 4)(GRAPH).notes == ()
    found = plan_reader(plan_file(tmp_path, network="other\x1b"), 4)(GRAPH)
    assert found.notes == (r"made for other\x1b, not for chain",)


def test_no_file_takes_the_name_of_another_plan(tmp_path: Path) -> None:
    """Those of a comparison are the baselines and the result; two files may have one name."""
    names = ("data.json", "a/layer.json.gz", "mine.json", "a/mine.json", "b/mine.json")
    found = plan_readers([tmp_path / name for name in names], 4)
    assert list(found) == ["data (file)", "layer (file)", "mine", "mine (file)", "mine (file 2)"]


def test_data_parallelism_is_shard_0_and_replicated_weights() -> None:
    found = export_dtensor(GRAPH, data_parallel(GRAPH, 4), 4)
    assert found.mesh == (2, 2)
    first = found.layers[0]
    assert (first.output, first.weights) == (("Shard(0)", "Shard(0)"), ("Replicate()", "Replicate()"))
    assert found.cannot == ()


def test_channels_of_a_fully_connected_layer_are_colwise() -> None:
    found = export_dtensor(GRAPH, one_weird_trick(GRAPH, 4), 4)
    assert found.parallelize_plan == {"fc1": "ColwiseParallel()", "fc2": "ColwiseParallel()"}
    fc1 = next(each for each in found.layers if each.layer == "fc1")
    assert (fc1.output, fc1.weights) == (("Shard(1)", "Shard(1)"), ("Shard(0)", "Shard(0)"))


def test_what_dtensor_cannot_say_is_named() -> None:
    names = [layer.name for layer in GRAPH.layers]
    choice = list(data_parallel(GRAPH, 4))
    choice[names.index("conv0")] = Config(h=2, w=2)
    choice[names.index("conv1")] = Config(n=2, c=2)
    choice[names.index("fc1")] = Config(c=2)
    choice[names.index("fc2")] = Config()
    choice[names.index("loss")] = REPLICATED
    found = dict(line.split(": ", 1) for line in export_dtensor(GRAPH, tuple(choice), 4).cannot)
    assert "no halos" in found["conv0"]
    assert "replicates its weights" in found["conv1"]
    assert "only 2 of 4 GPUs" in found["fc1"]
    assert "one of 4 GPUs" in found["fc2"]
    assert "loss" not in found
    normed = small_cnn(2).for_gpus(2)
    assert any("BatchNorm" in line for line in export_dtensor(normed, data_parallel(normed, 2), 2).cannot)


def solution(folder: Path, placements: dict[str, str], mesh: list[int]) -> Path:
    """Write a file like `autoparallel.serialization.save_solution`."""
    file = folder / "solution.json"
    file.write_text(json.dumps({"version": 1, "mesh_shape": mesh, "mesh_dim_names": None, "placements": placements}))
    return file


def test_placements_of_autoparallel_become_a_plan(tmp_path: Path) -> None:
    """Convolutions by samples, the first product by features, the second by samples and features."""
    placements = {f"convolution_{i}": "S(0)S(0)" for i in range(3)} | {"addmm": "S(1)S(1)", "addmm_1": "S(0)S(1)"}
    found = import_autoparallel(solution(tmp_path, placements, [2, 2]), GRAPH)
    splits = {split.name: (split.n, split.c) for split in found.plan.layers}
    assert splits == {"conv0": (4, 1), "conv1": (4, 1), "conv2": (4, 1), "fc1": (1, 4), "fc2": (2, 2)}
    assert "3 layers have no node of their own" in found.notes[0]


def test_the_other_file_of_autoparallel_is_matched_by_module_path(tmp_path: Path) -> None:
    nodes = [
        {
            "name": "a",
            "op": "aten.addmm.default",
            "phase": "forward",
            "placement": "S(1)",
            "module_path": "net.fc2",
            "shape": [8, 8],
        },
        {"name": "b", "op": "aten.mm.default", "phase": "backward", "placement": "R", "module_path": "net.fc1"},
        {"name": "c", "op": "output"},
    ]
    file = tmp_path / "sharding.json"
    file.write_text(json.dumps({"mesh": {"shape": [4], "dim_names": None}, "nodes": nodes, "summary": {}}))
    found = import_autoparallel(file, GRAPH)
    assert [(split.name, split.c) for split in found.plan.layers] == [("fc2", 4)]


def test_partial_sums_are_split_by_samples_and_the_comparison_says_so(tmp_path: Path) -> None:
    file = solution(tmp_path, {"addmm": "P(sum)", "addmm_1": "S(1)", "convolution": "S(3)"}, [8])
    graph = chain(8).for_gpus(8)
    splits = {split.name: (split.n, split.c, split.w) for split in import_autoparallel(file, graph).plan.layers}
    assert splits == {"conv0": (1, 1, 8), "fc1": (8, 1, 1), "fc2": (1, 8, 1)}
    partial, missing = plan_reader(file, 8)(graph).notes
    assert partial == "partial sums, which a plan has no word for, are taken as split by samples: fc1"
    assert missing == "5 layers have no node of their own and are split by samples"


@pytest.mark.parametrize("placement", ["RR", "(RR, S(0)R, None)"])
def test_what_is_replicated_over_the_whole_mesh_is_computed_by_every_gpu(tmp_path: Path, placement: str) -> None:
    choice = plan_reader(solution(tmp_path, {"addmm": placement}, [2, 2]), 4)(GRAPH).choice
    assert choice[[layer.name for layer in GRAPH.layers].index("fc1")] == REPLICATED


@pytest.mark.parametrize(
    ("placement", "words"),
    [
        ("S(0)R", "'S\\(0\\)R' puts each part of layer 'fc1' on 2 of 4 GPUs, which a plan cannot say"),
        ("S(0)S(7)", "splits dimension 7 of 2"),
        ("S(1)S(1)S(0)S(0)", "has 4 parts, and the mesh 2 dimensions"),
        ("S(0)S(0) and more", "has 0 parts"),
    ],
)
def test_a_placement_that_a_plan_cannot_say_is_refused(tmp_path: Path, placement: str, words: str) -> None:
    file = solution(tmp_path, {"addmm": placement}, [2, 2])
    with pytest.raises(ParallelPlanError, match=words) as error:
        import_autoparallel(file, GRAPH)
    assert f"{file}: $.placements.addmm: placement" in str(error.value)


def test_a_placement_that_does_not_divide_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ParallelPlanError, match="c=16 does not divide its 8 channels"):
        import_autoparallel(solution(tmp_path, {"addmm": "S(1)", "addmm_1": "S(1)"}, [16]), chain(2).for_gpus(16))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "is not valid JSON"),
        ("[]", "neither 'placements' nor 'nodes'"),
        ('{"placements": {}}', "has no mesh"),
        ('{"placements": {}, "mesh_shape": [true]}', "has no mesh"),
        ('{"placements": {"addmm": "S(0)"}, "mesh_shape": [2, 2]}', "has 1 part, and the mesh 2 dimensions"),
        ('{"placements": {"relu": "S(0)"}, "mesh_shape": [2]}', "no node of it is a layer"),
        ('{"nodes": [3], "mesh": {"shape": [2]}}', r"\$.nodes\[0\]"),
        ('{"nodes": 3, "mesh": {"shape": [2]}}', r"\$.nodes: is no list"),
        ('{"placements": 3, "mesh_shape": [2]}', r"\$.placements: is no list"),
        (f'{{"placements": {{"addmm": "S({"1" * 5000})"}}, "mesh_shape": [2]}}', "has 0 parts"),
        (f'{{"placements": {{}}, "mesh_shape": [1024{", 1024" * 1000}]}}', "more than 1024 GPUs"),
        (f'{{"placements": {{}}, "mesh_shape": [1{", 1" * 1000}]}}', "more than 1024 GPUs"),
    ],
)
def test_a_broken_file_of_autoparallel_is_refused(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "solution.json"
    file.write_text(text)
    with pytest.raises(ParallelPlanError, match=words):
        import_autoparallel(file, GRAPH)


def test_a_file_of_autoparallel_may_have_many_nodes(tmp_path: Path) -> None:
    """Each layer takes the next node of its kind, and checks no other."""
    placements = {f"convolution_{i}": "S(0)" for i in range(200_000)}
    found = import_autoparallel(solution(tmp_path, placements, [4]), GRAPH)
    assert [split.name for split in found.plan.layers] == ["conv0", "conv1", "conv2"]


def test_layers_of_one_path_take_its_nodes_in_turn(tmp_path: Path) -> None:
    """A node without a path is taken where no node of the path is left."""
    node = {"op": "aten.addmm.default", "shape": [8, 8]}
    nodes = [
        node | {"name": "a", "placement": "R"},
        node | {"name": "b", "placement": "S(1)", "module_path": "other.fc1"},
        node | {"name": "c", "placement": "S(0)", "module_path": "net.xfc2"},
        node | {"name": "d", "placement": "S(1)", "module_path": "net.fc2"},
    ]
    file = tmp_path / "solution.json"
    file.write_text(json.dumps({"mesh": {"shape": [4]}, "nodes": nodes}))
    found = {split.name: (split.n, split.c) for split in import_autoparallel(file, GRAPH).plan.layers}
    assert found == {"fc1": (1, 4), "fc2": (1, 4)}


def test_fixed_plans_follow_their_rules() -> None:
    graph = NETWORKS.alexnet(32).for_gpus(4)
    kinds = [layer.kind for layer in graph.layers]
    trick, model = one_weird_trick(graph, 4), model_parallel(graph, 4)
    assert {config for kind, config in zip(kinds, trick, strict=True) if kind == "linear"} == {Config(c=4)}
    assert {config for kind, config in zip(kinds, trick, strict=True) if kind != "linear"} == {Config(n=4)}
    assert {config for kind, config in zip(kinds, model, strict=True) if kind == "convolution"} == {Config(c=4)}
    assert model[-1] == Config(n=4), "the loss has no channels to split"
