"""Layers under construction, and what is known of them once all are read: shared and frozen weights, backward ops."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from gpusim.formats.trace import Trace
from gpusim.layerwise.frames import Frame
from gpusim.layerwise.layers import Layer, LayerGraph
from gpusim.layerwise.rule import tensors_in
from gpusim.layerwise.tied import tied_parameters, ties
from gpusim.layerwise.weight_regions import Region, shared_with


@dataclass(slots=True)
class Draft:
    """A layer under construction."""

    layer: Layer
    frame: Frame | None
    forward: list[int] = field(default_factory=list)
    backward: list[int] = field(default_factory=list)
    paths: set[str] = field(default_factory=set)
    weights: set[int] = field(default_factory=set)
    """Tensors of its parameters."""
    regions: set[Region] = field(default_factory=set)
    """Parts of them that it uses."""
    obstacle: str = ""
    """Why the executor cannot run it."""


def tie(trace: Trace, drafts: Sequence[Draft]) -> None:
    """Note which layers use weights of earlier ones: they split no channels, or cannot be run."""
    regions = [draft.regions for draft in drafts]
    for number, other in enumerate(shared_with(regions)):
        draft = drafts[number]
        if other is None or draft.obstacle:
            continue
        first = drafts[other]
        found = () if first.obstacle else ties(trace, [each.layer for each in drafts], regions, number, other)
        if not found:
            draft.obstacle = f"it uses the weights of layer '{first.layer.name}'"
            continue
        draft.layer = replace(draft.layer, tied=found, splits=draft.layer.splits.replace("c", ""))
        first.layer = replace(first.layer, splits=first.layer.splits.replace("c", ""))
    layers = [draft.layer for draft in drafts]
    for each in tied_parameters(LayerGraph(trace.name, trace.model.batch, tuple(layers))):
        first = drafts[each.first]
        first.layer = replace(first.layer, tied_elements=first.layer.tied_elements + each.elements)


def frozen_storages(trace: Trace) -> set[int]:
    """Return the storages of parameters that a training step's optimizer leaves as they are; none without one."""
    updates = [op for op in trace.ops if op.phase == "optimizer"]
    if not updates:
        return set()
    written = {trace.tensors[tensor].storage for op in updates for tensor in op.writes}
    return {each.storage for each in trace.tensors if each.role == "parameter" and each.storage not in written}


def assign_backward(trace: Trace, drafts: Sequence[Draft]) -> None:
    """Assign each backward op to a layer, if there is any."""
    if not drafts:
        return
    by_weight = {trace.tensors[t].storage: number for number, draft in enumerate(drafts) for t in draft.weights}
    maker: dict[int, int] = {}
    by_path: dict[str, list[int]] = {}
    for number, draft in enumerate(drafts):
        for path in draft.paths:
            by_path.setdefault(path, []).append(number)
        for place in draft.forward:
            for tensor in trace.ops[place].writes:
                maker[tensor] = number
    last = len(drafts) - 1
    for index, op in enumerate(trace.ops):
        if op.phase != "backward":
            continue
        read = set(op.reads) | set(tensors_in(op.args))
        owners = [by_weight[trace.tensors[t].storage] for t in read if trace.tensors[t].storage in by_weight]
        makers = [maker[t] for t in read if t in maker]
        candidates = by_path.get(op.layer, [])
        if op.layer and candidates:
            likely = [n for n in (*owners, *makers) if n in candidates]
            last = max(likely) if likely else max((n for n in candidates if n <= last), default=candidates[-1])
        elif owners or makers:
            last = max(owners or makers)
        drafts[last].backward.append(index)
