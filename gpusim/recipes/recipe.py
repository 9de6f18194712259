"""The recipe file (TOML): a list of cases to capture, explore and replay on a GPU."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

from msgspec import Meta

from gpusim.errors import RecipeError
from gpusim.files import Count, Document, Positive, read_toml
from gpusim.plan.schedule import MAX_STREAMS
from gpusim.policies.registry import POLICIES
from gpusim.search.explore import MAX_BUDGET_S
from gpusim.search.searches import SEARCH, SEARCHED
from gpusim.trace.schema import Dtype, Frontend, MemoryFormat, Mode
from gpusim.trace.store import bundled_traces

#: The best searched schedule of the captured kernels, where the search may use others, too.
WITHOUT_VARIANTS = "without variants"
#: Recorded order on one stream, each op with the variant that is fastest alone: what choosing kernels gains by itself.
FASTEST_KERNELS = "fastest kernels"
#: What a recipe may name besides the policies: what is recommended, and the best searched schedules of one kind.
SEARCHES = (*SEARCHED, WITHOUT_VARIANTS, FASTEST_KERNELS)
StreamCount = Annotated[int, Meta(ge=1, le=MAX_STREAMS)]


class Case(Document, frozen=True, kw_only=True):
    """One step: either `spec` with `mode` and `batch`, to be captured, or `trace`, to be used as it is."""

    spec: str | None = None
    """As for `gpusim capture`."""
    mode: Mode | None = None
    batch: Positive | None = None
    dtype: Dtype = "tf32"
    memory_format: MemoryFormat = "contiguous"
    frontend: Frontend = "aten"
    variants: bool = False
    """As for `gpusim capture`: other algorithms are measured, and the search may use them. A trace that is given gets
    those of operators of which it has none."""
    trace: str | None = None
    """A trace file or a bundled trace's name."""
    fitted: bool = False
    """Whether a constant of the hardware model was fitted on this network."""


class Recipe(Document, frozen=True, kw_only=True):
    """Cases, and what is done with each."""

    name: Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]*$")]
    """Begins the names of the results files: letters, digits, `_` and `-`."""
    case: tuple[Case, ...]
    policies: tuple[str, ...] = (SEARCH,)
    """Replayed besides the sequential one, each at the stream count that is predicted best; also any of `SEARCHES`."""
    counts: tuple[StreamCount, ...] = ()
    """Stream counts to replay each policy at, instead of the one predicted best."""
    random: Count = 0
    """Number of random legal schedules replayed for each case, on 2 to 8 streams."""
    pairs: Count = 0
    """Number of random pairs and triples of kernels run together for each case."""
    measure: Count = 0
    """Number of the schedules predicted best that are tried on the GPU; the fastest of them is the searched one."""
    recordings: Positive = 7
    """Recordings of each schedule, of which the one of median time is timed."""
    partitions: str | None = None
    """Splits of the SMs to search schedules on, as for `gpusim explore --partitions`."""
    streams: StreamCount = 8
    budget_s: Annotated[float, Meta(gt=0, le=MAX_BUDGET_S)] = 12.0
    seed: Count = 0
    traces: str | None = None
    """Folder that keeps the captured traces, from the working directory; none are kept where it is not given."""


def read_recipe(path: Path) -> Recipe:
    """Read a recipe. Raises `RecipeError` with file, place and what is wrong."""
    recipe = read_toml(path, Recipe, RecipeError)
    if not recipe.case:
        raise RecipeError(str(path), "has no cases", place="$.case")
    known = {*POLICIES, *SEARCHES}
    for index, policy in enumerate(recipe.policies):
        if policy not in known:
            problem = f"unknown policy '{policy}' (there are: {', '.join(sorted(known))})"
            raise RecipeError(str(path), problem, place=f"$.policies[{index}]")
    for index, case in enumerate(recipe.case):
        problem = _wrong_with(case)
        if problem:
            raise RecipeError(str(path), problem, place=f"$.case[{index}]")
    return recipe


def _wrong_with(case: Case) -> str:
    """What makes a case impossible, or nothing."""
    if (case.spec is None) == (case.trace is None):
        return "needs either 'spec' (with 'mode' and 'batch') or 'trace'"
    if case.spec is not None and (case.mode is None or case.batch is None):
        return f"'{case.spec}' needs 'mode' and 'batch'"
    if case.trace is not None and Case(trace=case.trace, fitted=case.fitted, variants=case.variants) != case:
        return "mode, batch, dtype, memory format and front end are those of the trace; leave them out"
    if case.trace is not None and case.trace not in bundled_traces() and not os.path.isfile(case.trace):
        return f"no trace '{case.trace}': neither a file nor bundled (there are: {', '.join(bundled_traces())})"
    return ""
