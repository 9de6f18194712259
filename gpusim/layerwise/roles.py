"""Equivalent GPUs of a plan: one of each kind is simulated.

Two GPUs are equivalent if in every layer their parts have the same extents and need and receive as much. If all splits
are even, all GPUs are, except for halos at the edges of a map.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from gpusim.layerwise.configs import boxes, needed, volume
from gpusim.layerwise.costs import Problem
from gpusim.layerwise.fixed_plans import Choice
from gpusim.layerwise.layers import BATCH, Ints

#: Most kinds of GPUs simulated: those with the most elements to compute.
MOST_ROLES: Final = 8


@dataclass(frozen=True, slots=True)
class Role:
    """A kind of equivalent GPUs: one of them, and their number."""

    gpu: int
    count: int


def roles_of(problem: Problem, choice: Choice) -> tuple[tuple[Role, ...], bool]:
    """Return the kinds of GPUs, GPU 0's first, and whether these are all."""
    devices = np.arange(problem.gpus)
    columns: list[Ints] = []
    layers = problem.graph.layers
    for layer, config in zip(layers, choice, strict=True):
        low, high = boxes(layer.output, config, devices)
        columns += list((high - low).T)
        for number, edge in enumerate(layer.inputs):
            need_low, need_high = needed(layer, number, low, high)
            columns.append(volume(need_low, need_high))
            if edge.source != BATCH:
                own_low, own_high = boxes(layers[edge.source].output, choice[edge.source], devices)
                kept = volume(np.maximum(need_low, own_low), np.minimum(need_high, own_high))
                columns.append(volume(need_low, need_high) - kept)
    signatures = np.stack(columns, axis=1)
    _, first, count = np.unique(signatures, axis=0, return_index=True, return_counts=True)
    order = np.argsort(first)
    roles = [Role(int(first[which]), int(count[which])) for which in order]
    if len(roles) <= MOST_ROLES:
        return tuple(roles), True
    work = signatures.sum(axis=1)
    rest = sorted(roles[1:], key=lambda role: (-int(work[role.gpu]), role.gpu))[: MOST_ROLES - 1]
    return (roles[0], *sorted(rest, key=lambda role: role.gpu)), False
