"""Placements of meta-pytorch/autoparallel as a plan to simulate.

Reads both of its JSON formats: `save_solution` (`mesh_shape`, and `placements` by node name) and `export_sharding_json`
(`mesh`, and `nodes` with `op`, `placement`, `module_path`). A placement is a row of `R`, `S(d)` and `P`, one for each
dimension of the mesh; of several outputs, the first one's counts. Nodes are matched to layers by module path, else in
order within their kind. Placements that a plan cannot say are refused; partial sums are taken as a split by samples,
with a note.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Final

import msgspec

from gpusim.errors import OptionError, ParallelPlanError
from gpusim.formats.parallel_plan import SCHEMA, LayerSplit, ParallelPlan
from gpusim.io.file_limits import MAX_DIMENSIONS, MAX_PLAN_GPUS
from gpusim.io.files import read_bytes
from gpusim.layerwise.configs import REPLICATED, Config, check_config
from gpusim.layerwise.layers import Layer, LayerGraph
from gpusim.text import shortened, visible
from gpusim.units import clause, counted

#: Kind of layer -> words in the names of its operators.
_KINDS: Final = {
    "convolution": ("convolution",),
    "linear": ("addmm", "mm", "linear", "einsum"),
    "attention": ("attention",),
}
_PART: Final = re.compile(r"S\(([0-9]{1,9})\)|R|P(?:\([a-z]*\))?")
#: The parts of a placement's first output: `S(0)R`, or of several outputs `(S(0)R, S(0)R)`.
_FIRST: Final = re.compile(rf"\(?((?:{_PART.pattern})+)(?:\)|,.*)?")
#: Most layers that a note names.
_NAMED: Final = 5
_LETTERS: Final = {2: "nc", 3: "nhc", 4: "nchw"}


@dataclass(frozen=True, slots=True)
class Imported:
    """The plan, and notes on placements that it cannot represent."""

    plan: ParallelPlan
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Node:
    name: str
    op: str
    path: str
    placement: str
    rank: int


def is_autoparallel(document: Any) -> bool:
    """Whether decoded JSON is one of the two files."""
    return isinstance(document, dict) and "schema" not in document and ("placements" in document or "nodes" in document)


def import_autoparallel(path: Path, graph: LayerGraph) -> Imported:
    """Return a plan for the layers of `graph`, which is that of the whole batch. Raises `ParallelPlanError`."""
    try:
        document = msgspec.json.decode(read_bytes(path, ParallelPlanError))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as cause:
        raise ParallelPlanError(str(path), f"is not valid JSON: {cause}") from cause
    if not is_autoparallel(document):
        raise ParallelPlanError(str(path), "is no file of autoparallel: neither 'placements' nor 'nodes'")
    mesh = _mesh(path, document)
    gpus = prod(mesh)
    left = _by_kind(_nodes(path, document))
    splits: list[LayerSplit] = []
    summed: list[str] = []
    for layer in graph.layers:
        node = _match(layer, left)
        if node is None:
            continue
        config, has_sums = _config(path, layer, node, mesh, gpus)
        if has_sums:
            summed.append(layer.name)
        n, c, h, w = config.degrees
        splits.append(LayerSplit(name=layer.name, n=n, c=c, h=h, w=w, replicated=config.replicated))
    if not splits:
        raise ParallelPlanError(str(path), f"no node of it is a layer of {graph.name}")
    notes = []
    if summed:
        named = ", ".join(summed[:_NAMED]) + (f" and {len(summed) - _NAMED} more" if len(summed) > _NAMED else "")
        notes.append(f"partial sums, which a plan has no word for, are taken as split by samples: {named}")
    missing = len(graph.layers) - len(splits)
    if missing:
        said = clause(missing, "layer", "has no node of its own and is", "have no node of their own and are")
        notes.append(f"{said} split by samples")
    plan = ParallelPlan(schema=SCHEMA, network=graph.name, gpus=gpus, made_by="autoparallel", layers=tuple(splits))
    return Imported(plan, tuple(notes))


def _mesh(path: Path, document: dict[str, Any]) -> tuple[int, ...]:
    mesh = document.get("mesh_shape")
    if mesh is None and isinstance(document.get("mesh"), dict):
        mesh = document["mesh"].get("shape")
    if not isinstance(mesh, list) or not mesh or not all(type(s) is int and 1 <= s <= 1024 for s in mesh):
        raise ParallelPlanError(str(path), "has no mesh of sizes from 1 to 1024", place="$.mesh_shape")
    if len(mesh) > MAX_DIMENSIONS or prod(mesh) > MAX_PLAN_GPUS:
        raise ParallelPlanError(str(path), f"is for more than {MAX_PLAN_GPUS} GPUs", place="$.mesh_shape")
    return tuple(mesh)


def _nodes(path: Path, document: dict[str, Any]) -> Iterable[_Node]:
    """Return the forward nodes with placements."""
    placements = document.get("placements")
    if isinstance(placements, dict):
        for name, placement in placements.items():
            if isinstance(placement, str):
                yield _Node(str(name), str(name), "", placement, 0)
        return
    nodes = document.get("nodes")
    if not isinstance(nodes, list):
        raise ParallelPlanError(str(path), "is no list", place="$.nodes" if "nodes" in document else "$.placements")
    for place, node in enumerate(nodes):
        if not isinstance(node, dict) or not isinstance(node.get("name"), str):
            raise ParallelPlanError(str(path), "is no node", place=f"$.nodes[{place}]")
        placement = node.get("placement")
        if isinstance(placement, str) and node.get("phase", "forward") == "forward":
            shape = node.get("shape")
            rank = len(shape) if isinstance(shape, list) else 0
            yield _Node(node["name"], str(node.get("op", "")), str(node.get("module_path") or ""), placement, rank)


@dataclass(slots=True)
class _Left:
    """Nodes of one kind not yet matched to a layer, in file order."""

    nodes: dict[str, _Node]
    by_end: dict[str, list[str]]
    """Names of nodes by the last part of their module paths."""
    without_path: deque[str]


def _by_kind(nodes: Iterable[_Node]) -> dict[str, _Left]:
    """Group nodes by kind of layer. Of nodes with one name, only the first counts."""
    left = {kind: _Left({}, {}, deque()) for kind in _KINDS}
    for node in nodes:
        for kind, words in _KINDS.items():
            mine = left[kind]
            if node.name in mine.nodes or not any(word in node.op for word in words):
                continue
            mine.nodes[node.name] = node
            if node.path:
                mine.by_end.setdefault(_end(node.path), []).append(node.name)
            else:
                mine.without_path.append(node.name)
    return left


def _end(path: str) -> str:
    return path.rpartition(".")[2]


def _match(layer: Layer, left: dict[str, _Left]) -> _Node | None:
    """Take the node of a layer: by its module path, else the next node without one."""
    mine = left.get(layer.kind)
    if mine is None:
        return None
    name = None
    if layer.path:
        alike = mine.by_end.get(_end(layer.path), [])
        name = next((n for n in alike if n in mine.nodes and mine.nodes[n].path.endswith(layer.path)), None)
    while name is None and mine.without_path:
        first = mine.without_path.popleft()
        name = first if first in mine.nodes else None
    if name is None:
        return None
    node = mine.nodes[name]
    for each in left.values():
        each.nodes.pop(name, None)
    return node


def _config(path: Path, layer: Layer, node: _Node, mesh: tuple[int, ...], gpus: int) -> tuple[Config, bool]:
    """Return the configuration of a placement, and whether it has partial sums. Raises `ParallelPlanError`."""
    place = f"$.placements.{node.name}"
    shown = f"placement '{shortened(visible(node.placement))}'"
    first = _FIRST.fullmatch(node.placement)
    parts = [match[0] for match in _PART.finditer(first[1])] if first else []
    if len(parts) != len(mesh):
        problem = f"{shown} has {counted(len(parts), 'part')}, and the mesh {counted(len(mesh), 'dimension')}"
        raise ParallelPlanError(str(path), problem, place=place)
    rank = node.rank or (4 if layer.output[3] > 1 or layer.kind == "convolution" else 2 if layer.output[2] == 1 else 3)
    letters = _LETTERS.get(rank, "nchw")
    degrees = {"n": 1, "c": 1, "h": 1, "w": 1}
    copies = 1
    for part, size in zip(parts, mesh, strict=True):
        matched = _PART.match(part)
        if matched and matched[1] is not None:
            if int(matched[1]) >= len(letters):
                raise ParallelPlanError(str(path), f"{shown} splits dimension {matched[1]} of {rank}", place=place)
            degrees[letters[int(matched[1])]] *= size
        elif part.startswith("P"):
            degrees["n"] *= size
        else:
            copies *= size
    if copies == gpus > 1:
        return REPLICATED, False
    if copies > 1:
        problem = f"{shown} puts each part of layer '{layer.name}' on {copies} of {gpus} GPUs, which a plan cannot say"
        raise ParallelPlanError(str(path), problem, place=place)
    config = Config(degrees["n"], degrees["c"], degrees["h"], degrees["w"])
    try:
        check_config(layer, config, gpus)
    except OptionError as cause:
        raise ParallelPlanError(str(path), f"{shown}: {cause.problem}", place=place) from cause
    return config, any(part.startswith("P") for part in parts)
