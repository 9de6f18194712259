"""The document of a plan for several GPUs: how each layer of a step is split."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final, Literal

from msgspec import Meta

from gpusim.errors import ParallelPlanError
from gpusim.io import file_limits
from gpusim.io.files import Document, read_document, write_document

SCHEMA: Final = "gpusim-parallel-plan/1"

Degree = Annotated[int, Meta(ge=1, le=file_limits.MAX_PLAN_GPUS)]
PlanGpus = Annotated[int, Meta(ge=1, le=file_limits.MAX_PLAN_GPUS)]


class LayerSplit(Document, frozen=True, kw_only=True):
    """Parts of a layer's output; GPUs 0, 1, ... have them, channels running fastest."""

    name: str
    """The layer."""
    n: Degree = 1
    """Of samples."""
    c: Degree = 1
    """Of channels."""
    h: Degree = 1
    """Of the height, or of a sequence."""
    w: Degree = 1
    """Of the width."""
    replicated: bool = False
    """Every GPU computes all of it."""


class ParallelPlan(Document, frozen=True, kw_only=True, omit_defaults=True):
    """A layer that is not listed is split by samples."""

    schema: Literal["gpusim-parallel-plan/1"]
    """`gpusim-parallel-plan/1`."""
    network: str
    """What it is for."""
    gpus: PlanGpus
    """GPUs."""
    made_by: str = ""
    """`layer`, `data`, `model`, `owt`, or a program."""
    layers: Annotated[tuple[LayerSplit, ...], Meta(max_length=file_limits.MAX_PARTS)] = ()
    """Layers."""


def read_plan(path: Path) -> ParallelPlan:
    """Read a plan. Raises `ParallelPlanError`."""
    return read_document(path, ParallelPlan, SCHEMA, ParallelPlanError)


def write_plan(path: Path, plan: ParallelPlan) -> None:
    """Write a plan. Raises `OutputError`."""
    write_document(path, plan, indent=1)
