"""Plans as documents, validated against their layers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from gpusim.errors import OptionError, ParallelPlanError
from gpusim.formats.parallel_plan import SCHEMA, LayerSplit, ParallelPlan, read_plan
from gpusim.io.files import read_bytes
from gpusim.layerwise.autoparallel import import_autoparallel, is_autoparallel
from gpusim.layerwise.configs import REPLICATED, Config, check_config
from gpusim.layerwise.fixed_plans import FIXED_PLANS, SEARCHED, Choice, data_parallel
from gpusim.layerwise.layers import LayerGraph
from gpusim.text import shortened, visible
from gpusim.units import counted


def to_document(graph: LayerGraph, gpus: int, choice: Choice, made_by: str) -> ParallelPlan:
    """Return the document of a plan."""
    return ParallelPlan(
        schema=SCHEMA,
        network=graph.name,
        gpus=gpus,
        made_by=made_by,
        layers=tuple(
            LayerSplit(name=layer.name, n=config.n, c=config.c, h=config.h, w=config.w, replicated=config.replicated)
            for layer, config in zip(graph.layers, choice, strict=True)
        ),
    )


def from_document(plan: ParallelPlan, graph: LayerGraph, file: str) -> Choice:
    """Return the configurations of a plan; `graph` is that of the batch of all GPUs, `file` is for messages.

    Raises `ParallelPlanError` for an unknown or duplicate layer, a degree that does not divide, a split without a rule,
    or a layer that is both split and replicated.
    """
    place_of = {layer.name: index for index, layer in enumerate(graph.layers)}
    choice = list(data_parallel(graph, plan.gpus))
    seen: set[str] = set()
    for number, split in enumerate(plan.layers):
        place = f"$.layers[{number}]"
        name = f"'{shortened(visible(split.name))}'"
        if split.name not in place_of:
            raise ParallelPlanError(file, f"{graph.name} has no layer {name}", place=place)
        if split.name in seen:
            raise ParallelPlanError(file, f"layer {name} comes twice", place=place)
        seen.add(split.name)
        index = place_of[split.name]
        config = Config(split.n, split.c, split.h, split.w)
        if split.replicated and config.parts > 1:
            raise ParallelPlanError(file, f"layer {name} is replicated, and split by {config}", place=place)
        config = REPLICATED if split.replicated else config
        try:
            choice[index] = check_config(graph.layers[index], config, plan.gpus)
        except OptionError as cause:
            raise ParallelPlanError(file, cause.problem, place=place) from cause
    return tuple(choice)


@dataclass(frozen=True, slots=True)
class GivenPlan:
    """A plan of the user, with notes on what it does not say as its file does."""

    choice: Choice
    notes: tuple[str, ...] = ()


PlanReader = Callable[[LayerGraph], GivenPlan]
"""Returns a plan for the layers of the batch of all GPUs."""


def plan_readers(paths: Iterable[Path], gpus: int) -> dict[str, PlanReader]:
    """Return a reader for each file, by a name that no other plan of a comparison has."""
    readers: dict[str, PlanReader] = {}
    for path in paths:
        stem = shortened(visible(path.name.removesuffix(".gz").removesuffix(".json")))
        name, number = stem, 1
        while name in readers or name in (*FIXED_PLANS, SEARCHED):
            name = f"{stem} (file)" if number == 1 else f"{stem} (file {number})"
            number += 1
        readers[name] = plan_reader(path, gpus)
    return readers


def plan_reader(path: Path, gpus: int) -> PlanReader:
    """Return a reader of a plan file, gpusim's or autoparallel's, to be called with the layers.

    The reader raises `ParallelPlanError`, also for a plan for another number of GPUs.
    """

    def read(graph: LayerGraph) -> GivenPlan:
        try:
            foreign = is_autoparallel(msgspec.json.decode(read_bytes(path, ParallelPlanError)))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            foreign = False
        notes: tuple[str, ...] = ()
        if foreign:
            imported = import_autoparallel(path, graph)
            plan, notes = imported.plan, imported.notes
        else:
            plan = read_plan(path)
            if plan.network != graph.name:
                notes = (f"made for {shortened(visible(plan.network))}, not for {graph.name}",)
        if plan.gpus != gpus:
            raise ParallelPlanError(str(path), f"is for {counted(plan.gpus, 'GPU')}, not {gpus}", place="$.gpus")
        return GivenPlan(from_document(plan, graph, str(path)), notes)

    return read
