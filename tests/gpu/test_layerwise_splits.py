"""Captured networks on ranks, under every split of each of their layers, against one device.

All in one test for each number of ranks: a rank takes seconds to start.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

import pytest

from gpusim.trace.store import write_trace
from tests.support import attention_models, kind_models, pointwise_models
from tests.support.captured import captured
from tests.support.kind_models import RANDOM, SPLITS, TIED
from tests.support.layer_networks import check_on_ranks

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


@pytest.mark.parametrize(("gpus", "networks"), [(2, ON_TWO), (4, ON_FOUR)], ids=["two", "four"])
def test_networks_are_equal_under_every_split(gpus: int, networks: Networks, tmp_path: Path) -> None:
    """Loss and gradients of each rank; each configuration of each layer is in at least one plan."""
    splits: dict[Path, int] = {}
    for models, names, least in networks:
        for name in names:
            file = tmp_path / f"{name}.json.gz"
            write_trace(captured(models, name), file)
            splits[file] = least
    check_on_ranks(gpus, splits)
