"""The parallel plan document: the split of each layer of a step over several GPUs."""

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
    """Split of a layer's output into parts for GPUs 0, 1, ..., with channels varying fastest."""

    name: str
    """Name of the layer."""
    n: Degree = 1
    """Parts along samples."""
    c: Degree = 1
    """Parts along channels."""
    h: Degree = 1
    """Parts along the height or the sequence."""
    w: Degree = 1
    """Parts along the width."""
    replicated: bool = False
    """True if every GPU computes the whole layer."""


class ParallelPlan(Document, frozen=True, kw_only=True, omit_defaults=True):
    """A plan for several GPUs; unlisted layers are split by samples."""

    schema: Literal["gpusim-parallel-plan/1"]
    """`gpusim-parallel-plan/1`."""
    network: str
    """Name of the network."""
    gpus: PlanGpus
    """Number of GPUs."""
    made_by: str = ""
    """`layer`, `data`, `model`, `owt`, or a program."""
    layers: Annotated[tuple[LayerSplit, ...], Meta(max_length=file_limits.MAX_PARTS)] = ()
    """Splits of the layers."""


def read_plan(path: Path) -> ParallelPlan:
    """Read a plan. Raises `ParallelPlanError`."""
    return read_document(path, ParallelPlan, SCHEMA, ParallelPlanError)


def write_plan(path: Path, plan: ParallelPlan) -> None:
    """Write a plan. Raises `OutputError`."""
    write_document(path, plan, indent=1)
