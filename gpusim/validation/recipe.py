"""Recipe file (TOML): a list of cases to capture, explore and replay on a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from msgspec import Meta

from gpusim.defaults import DEFAULT_SEED, DEFAULT_STREAMS, MAX_BUDGET_S
from gpusim.errors import RecipeError
from gpusim.formats.results import Baseline
from gpusim.formats.trace import Dtype, Frontend, MemoryFormat, Mode, named_trace
from gpusim.gpu.replay.allowlist import check_operators
from gpusim.io.files import Count, Document, Positive, read_toml
from gpusim.io.packed import is_file
from gpusim.memplan.policies.registry import MEMORY_POLICIES
from gpusim.plan.schedule import MAX_STREAMS
from gpusim.policies.registry import POLICIES
from gpusim.search.budget import SEARCH, SEARCHED
from gpusim.trace.store import bundled_traces, read_trace
from gpusim.trace.trust import check_trace_code, names_code, require_trust, wrong_name

#: The best searched schedule of the captured kernels, where the search may use variants.
WITHOUT_VARIANTS = "without variants"
#: Recorded order on one stream, each op with its fastest variant in isolation: the gain of kernel selection alone.
FASTEST_KERNELS = "fastest kernels"
#: The recommendation of `gpusim explore`: a policy's schedule or a searched one.
RECOMMENDED = "recommended"
#: Names that a recipe may use in addition to policies: the recommendation, and the best searched schedules by kind.
SEARCHES = (RECOMMENDED, *SEARCHED, WITHOUT_VARIANTS, FASTEST_KERNELS)
StreamCount = Annotated[int, Meta(ge=1, le=MAX_STREAMS)]


class Case(Document, frozen=True, kw_only=True):
    """One step: either `spec` with `mode` and `batch`, to capture, or `trace`, to use as it is."""

    spec: str | None = None
    """Model, as for `gpusim capture`."""
    mode: Mode | None = None
    batch: Positive | None = None
    dtype: Dtype = "tf32"
    memory_format: MemoryFormat = "contiguous"
    frontend: Frontend = "aten"
    variants: bool = False
    """As for `gpusim capture`: measure other algorithms and let the search use them. A given trace gets variants for
    operators that have none.
    """
    trace: str | None = None
    """Trace file, or name of a bundled trace."""
    fitted: bool = False
    """Whether a constant of the hardware model was fitted on this network."""
    against: tuple[Baseline, ...] = ()
    """Further baselines of this case; only where the recipe has some."""

    @property
    def trace_name(self) -> str:
        """Name of the trace that a capture of this case makes. Only for a case with `spec`."""
        assert self.spec is not None
        assert self.mode is not None
        assert self.batch is not None
        network = self.spec.rpartition(":")[2]
        return named_trace(network, self.mode, self.batch, self.dtype, self.frontend)


class Recipe(Document, frozen=True, kw_only=True):
    """Cases, and the work for each."""

    name: Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]*$(?!\n)")]
    """Prefix of the results files' names: letters, digits, `_` and `-`."""
    case: tuple[Case, ...]
    against: tuple[Baseline, ...] = ()
    """Baselines: each case is optimized (`gpusim.optimize`) and timed with these, and no schedules are replayed."""
    policies: tuple[str, ...] = (SEARCH,)
    """Policies to replay in addition to the sequential one, at the stream count predicted best; or any of
    `SEARCHES`.
    """
    counts: tuple[StreamCount, ...] = ()
    """Stream counts to replay each policy at, instead of the one predicted best."""
    memory_policies: tuple[str, ...] = ()
    """Memory policies to replay instead of schedules, in addition to the one that keeps all; only for runs in
    stages.
    """
    memory_budgets: tuple[Annotated[float, Meta(gt=0, le=1)], ...] = ()
    """Budgets for policies that take one, as shares of the peak of the step that keeps all."""
    memory_matched: bool = False
    """Whether our own policy is replayed, too, with the peak of each of these as its budget."""
    random: Count = 0
    """Number of random legal schedules replayed per case, on 2 to 8 streams."""
    pairs: Count = 0
    """Number of random pairs and triples of concurrent kernels per case."""
    measure: Count = 0
    """Number of the schedules predicted best to try on the GPU; the fastest of them is the searched one."""
    trials: Count = 0
    """Number of schedules per policy, and of the search, to try on the GPU, both with captured and with the fastest
    kernels; the fastest schedule of each is replayed. Only for runs in stages.
    """
    processes: Positive = 1
    """Processes that replay each schedule; only for runs in stages."""
    recordings: Positive = 7
    """Recordings per schedule; the one of median time is timed (of an even number, the faster of the middle two)."""
    partitions: str | None = None
    """SM splits to search schedules on, as for `gpusim explore --partitions`."""
    streams: StreamCount = DEFAULT_STREAMS
    budget_s: Annotated[float, Meta(gt=0, le=MAX_BUDGET_S)] = 12.0
    seed: Count = DEFAULT_SEED
    traces: str | None = None
    """Folder that keeps the captured traces, relative to the working directory; none are kept without it."""


def read_recipe(path: Path) -> Recipe:
    """Read a recipe. Raises `RecipeError` with file, place and problem."""
    recipe = read_toml(path, Recipe, RecipeError)
    if not recipe.case:
        raise RecipeError(str(path), "has no cases", place="$.case")
    known = {*POLICIES, *SEARCHES}
    for index, policy in enumerate(recipe.policies):
        if policy not in known:
            problem = f"unknown policy '{policy}' (there are: {', '.join(sorted(known))})"
            raise RecipeError(str(path), problem, place=f"$.policies[{index}]")
        if recipe.trials and policy in SEARCHES and policy not in (SEARCH, FASTEST_KERNELS):
            raise RecipeError(str(path), f"trials compare policies, not '{policy}'", place=f"$.policies[{index}]")
    for index, policy in enumerate(recipe.memory_policies):
        if policy not in MEMORY_POLICIES:
            problem = f"unknown memory policy '{policy}' (there are: {', '.join(sorted(MEMORY_POLICIES))})"
            raise RecipeError(str(path), problem, place=f"$.memory_policies[{index}]")
    for index, case in enumerate(recipe.case):
        problem = _wrong_with(case) or _wrong_against(case, recipe)
        if problem:
            raise RecipeError(str(path), problem, place=f"$.case[{index}]")
    return recipe


def check_recipe(recipe: Recipe, file: str, trust_code: bool) -> None:
    """Check a recipe's code and operators before anything runs, without torch and GPU.

    Raises `TrustError` for a Python file that is not trusted, `OperatorError` for an operator that replay refuses.
    """
    check_recipe_code(recipe, file, trust_code)
    for case in recipe.case:
        if case.trace is not None:
            path = bundled_traces().get(case.trace, Path(case.trace))
            trace = read_trace(path)
            check_trace_code(trace, str(path), trust_code)
            check_operators(trace, str(path))


def check_recipe_code(recipe: Recipe, file: str, trust_code: bool) -> None:
    """Raise `TrustError` for a recipe that names a Python file to run, unless it is trusted."""
    for index, case in enumerate(recipe.case):
        if case.spec is not None and names_code(case.spec):
            require_trust(file, f"$.case[{index}].spec", f"'{case.spec[:200]}' runs that Python file", trust_code)


def _wrong_with(case: Case) -> str:
    """Return the reason why a case is invalid, or ""."""
    if (case.spec is None) == (case.trace is None):
        return "needs either 'spec' (with 'mode' and 'batch') or 'trace'"
    if case.spec is not None and (case.mode is None or case.batch is None):
        return f"'{case.spec}' needs 'mode' and 'batch'"
    if case.spec is not None and (wrong := wrong_name(case.spec)):
        return wrong
    if case.trace is not None and Case(trace=case.trace, fitted=case.fitted, variants=case.variants) != case:
        return "mode, batch, dtype, memory format and front end are those of the trace; leave them out"
    if case.trace is not None and case.trace not in bundled_traces() and not is_file(Path(case.trace)):
        return f"no trace '{case.trace}': neither a file nor bundled (there are: {', '.join(bundled_traces())})"
    return ""


def _wrong_against(case: Case, recipe: Recipe) -> str:
    """Return the reason why a case contradicts the recipe's baselines, or ""."""
    if recipe.against and case.trace is not None:
        return "a recipe with 'against' optimizes models; give 'spec' in place of 'trace'"
    if case.against and not recipe.against:
        return "'against' of a case goes with 'against' of the recipe"
    return ""
