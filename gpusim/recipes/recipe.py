"""The recipe file (TOML): a list of cases to capture, explore and replay on a GPU."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from gpusim.errors import RecipeError
from gpusim.files import Count, Document, Positive
from gpusim.plan.schedule import MAX_STREAMS
from gpusim.policies.registry import POLICIES
from gpusim.search.explore import MAX_BUDGET_S, SEARCH
from gpusim.trace.schema import Dtype, Frontend, MemoryFormat, Mode

_MESSAGE = re.compile(r"^(?P<problem>.*?)(?: - at `(?P<path>\$[^`]*)`)?$", re.DOTALL)


class Case(Document, frozen=True, kw_only=True):
    """One step."""

    spec: str
    """As for `gpusim capture`."""
    mode: Mode
    batch: Positive
    dtype: Dtype = "tf32"
    memory_format: MemoryFormat = "contiguous"
    frontend: Frontend = "aten"
    fitted: bool = False
    """Whether a constant of the hardware model was fitted on this network."""


class Recipe(Document, frozen=True, kw_only=True):
    """Cases, and what is done with each."""

    name: Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]*$")]
    """Begins the names of the results files: letters, digits, `_` and `-`."""
    case: tuple[Case, ...]
    policies: tuple[str, ...] = (SEARCH,)
    """Policies replayed besides the sequential one; each at the stream count that is predicted best."""
    streams: Annotated[int, Meta(ge=1, le=MAX_STREAMS)] = 8
    budget_s: Annotated[float, Meta(gt=0, le=MAX_BUDGET_S)] = 12.0
    seed: Count = 0
    traces: str | None = None
    """Folder that keeps the captured traces, from the working directory; none are kept where it is not given."""


def read_recipe(path: Path) -> Recipe:
    """Read a recipe. Raises `RecipeError` with file, place and what is wrong."""
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as cause:
        raise RecipeError(str(path), f"cannot be read: {cause.strerror}") from cause
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as cause:
        raise RecipeError(str(path), f"is not valid TOML: {cause}") from cause
    try:
        recipe = msgspec.convert(document, Recipe)
    except msgspec.ValidationError as cause:
        match = _MESSAGE.match(str(cause))
        assert match is not None
        raise RecipeError(str(path), match["problem"], place=match["path"] or "$") from cause
    if not recipe.case:
        raise RecipeError(str(path), "has no cases", place="$.case")
    known = {*POLICIES, SEARCH}
    for index, policy in enumerate(recipe.policies):
        if policy not in known:
            problem = f"unknown policy '{policy}' (there are: {', '.join(sorted(known))})"
            raise RecipeError(str(path), problem, place=f"$.policies[{index}]")
    return recipe
