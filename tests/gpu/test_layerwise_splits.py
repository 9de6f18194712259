"""Plans on real ranks: gloo on CPUs, every kind of layer and split, against one device.

Each launch starts processes that import torch for seconds, so all that a number of ranks computes shares one.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from types import ModuleType
from typing import Any

import pytest

from gpusim.trace.store import write_trace
from tests.support import attention_models, kind_models, pointwise_models
from tests.support.captured import captured
from tests.support.kind_models import RANDOM, SPLITS, TIED
from tests.support.layer_networks import small_cnn, start

#: Module of networks, names of networks, and the number of different splits that the plans of each have at least.
Networks = list[tuple[ModuleType, Iterable[str], int]]
ON_TWO: Networks = [
    (attention_models, [*attention_models.NETWORKS, "tied"], 12),
    (kind_models, [*SPLITS, *RANDOM], 5),
    (kind_models, TIED, 8),
    (pointwise_models, pointwise_models.NETWORKS, 5),
]
#: Kinds with parts between two others, or with weights that are split.
ON_FOUR: Networks = [
    (attention_models, ["masked", "unbind", "other_keys", "words", "windows", "maps"], 12),
    (kind_models, ["convolved_with_gaps", "convolved_groups", "group_norm", "upsampled_thrice", "transposed"], 5),
    (kind_models, ["transposed_odd", "bag_of_means", "grouped", "averaged_without_padding"], 5),
    (kind_models, ["larger_by_channels", "smaller_by_channels"], 5),
    (kind_models, TIED, 8),
    (pointwise_models, pointwise_models.NETWORKS, 5),
]


NETWORKS = {2: ON_TWO, 4: ON_FOUR}


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Any]]:
    """What two and four ranks have found, by the number of ranks; then by job, or by name of a captured network."""
    folder = tmp_path_factory.mktemp("captured")
    found = {}
    for gpus, networks in NETWORKS.items():
        files = {}
        for models, names, _ in networks:
            for name in names:
                files[name] = folder / f"{name}.json.gz"
                write_trace(captured(models, name), files[name])
        jobs = ("check", "local", "layers") if gpus == 2 else ("check",)
        answer = json.loads(start(gpus, *jobs, *map(str, files.values()), timeout_s=600))
        found[gpus] = {job: answer[job] for job in jobs} | {name: answer[str(file)] for name, file in files.items()}
    return found


@pytest.mark.parametrize("gpus", NETWORKS)
def test_every_kind_of_layer_and_split_computes_what_one_device_does(
    gpus: int, answers: dict[int, dict[str, Any]]
) -> None:
    """Loss and gradients in double precision. Each split of each layer occurs in at least one plan."""
    check_equal(answers[gpus]["check"])
    assert answers[gpus]["check"]["plans"] > 12


@pytest.mark.parametrize("gpus", NETWORKS)
def test_captured_networks_are_equal_under_every_split(gpus: int, answers: dict[int, dict[str, Any]]) -> None:
    for _, names, least in NETWORKS[gpus]:
        for name in names:
            check_equal(answers[gpus][name], name)
            assert answers[gpus][name]["splits"] > least, name


def check_equal(found: dict[str, Any], name: str = "") -> None:
    """Require loss and gradients of one device from every split of every layer."""
    assert found["splits"] == found["possible_splits"], name
    assert found["unequal"] == [], name
    assert found["worst"] < 1e-9, name


def test_local_statistics_are_those_of_each_part_of_the_batch(answers: dict[int, dict[str, Any]]) -> None:
    """On two ranks as if each had run its samples alone; parts of an image share statistics. Rounding is no error."""
    assert answers[2]["local"] == {"samples": True, "height": True, "bias_before_norm": True}


def test_each_layer_is_timed_on_each_rank_beside_its_prediction(answers: dict[int, dict[str, Any]]) -> None:
    """Rank 1 has no part of one convolution: nothing is computed there, and nothing predicted."""
    layers = {layer["name"]: layer for layer in answers[2]["layers"]["layers"]}
    assert len(layers) == len(small_cnn(1).layers)
    for pass_ in ("forward_ns", "backward_ns", "predicted_forward_ns", "predicted_backward_ns"):
        assert all(time > 0 for time in layers["stem"][pass_])
        assert layers["one"][pass_][0] > 0
    assert layers["one"]["forward_ns"][1] == 0
    assert layers["one"]["predicted_forward_ns"][1] == layers["one"]["predicted_backward_ns"][1] == 0
    assert layers["one"]["predicted_transfer_ns"] > 0 == layers["stem"]["predicted_transfer_ns"]
    assert all(time > 0 for time in layers["one"]["transfer_ns"])
    assert all(time > 0 for time in layers["stem"]["sums_ns"])
