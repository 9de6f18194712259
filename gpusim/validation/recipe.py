"""Read and check recipe files (`gpusim.formats.recipe`): names, traces, and the code that they would run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from gpusim.defaults import RECOMMENDED, SEARCH, SEARCHED
from gpusim.errors import RecipeError
from gpusim.formats.recipe import Case, Recipe
from gpusim.gpu.replay.allowlist import check_operators
from gpusim.io.files import read_toml
from gpusim.io.packed import is_file
from gpusim.memplan.policies.registry import MEMORY_POLICIES
from gpusim.policies.registry import POLICIES
from gpusim.trace.store import bundled_traces, read_trace
from gpusim.trace.trust import check_trace_code, names_code, require_trust, wrong_name

#: The best searched schedule of the captured kernels, where the search may use variants.
WITHOUT_VARIANTS = "without variants"
#: IOS with stage latencies measured on the GPU (`gpusim.validation.stage_times`).
MEASURED_IOS = "ios, measured stages"
#: Recorded order on one stream, each op with its fastest variant in isolation: the gain of kernel selection alone.
FASTEST_KERNELS = "fastest kernels"
#: Names that a recipe may use in addition to policies: the recommendation, and the best searched schedules by kind.
SEARCHES = (RECOMMENDED, *SEARCHED, WITHOUT_VARIANTS, FASTEST_KERNELS)
#: Begin of the name of the best searched schedule with each split of the SMs.
ON_PARTITIONS = "partitions "


def is_search(policy: str) -> bool:
    """Return whether rows of results with this name are searched schedules; those recommended may be."""
    return policy in (*SEARCHED, WITHOUT_VARIANTS) or policy.startswith(ON_PARTITIONS)


def read_recipe(path: Path, numbers: Sequence[int] = ()) -> Recipe:
    """Read a recipe. Raises `RecipeError` with file, place and problem, first for `numbers` of cases that it lacks."""
    recipe = read_toml(path, Recipe, RecipeError)
    if not recipe.case:
        raise RecipeError(str(path), "has no cases", place="$.case")
    check_numbers(recipe, numbers, str(path))
    known = {*POLICIES, *SEARCHES, MEASURED_IOS}
    for index, policy in enumerate(recipe.policies):
        if policy not in known:
            names = ", ".join(f"'{name}'" for name in sorted(known))  # one has a comma
            problem = f"unknown policy '{policy}' (there are: {names})"
            raise RecipeError(str(path), problem, place=f"$.policies[{index}]")
        if recipe.trials and policy in SEARCHES and policy not in (SEARCH, FASTEST_KERNELS):
            raise RecipeError(str(path), f"trials compare policies, not '{policy}'", place=f"$.policies[{index}]")
        if policy == MEASURED_IOS and not recipe.trials:
            raise RecipeError(str(path), f"'{policy}' goes with trials", place=f"$.policies[{index}]")
    for index, policy in enumerate(recipe.memory_policies):
        if policy not in MEMORY_POLICIES:
            problem = f"unknown memory policy '{policy}' (there are: {', '.join(sorted(MEMORY_POLICIES))})"
            raise RecipeError(str(path), problem, place=f"$.memory_policies[{index}]")
    for index, case in enumerate(recipe.case):
        problem = _wrong_with(case) or _wrong_against(case, recipe)
        if problem:
            raise RecipeError(str(path), problem, place=f"$.case[{index}]")
    if recipe.trials and recipe.neighbours:
        raise RecipeError(
            str(path), "trials replay the fastest of those tried, neighbours all; give one of both", place="$.trials"
        )
    if recipe.ablations and recipe.against:
        raise RecipeError(str(path), "has 'against', too: give one of both", place="$.ablations")
    if len(set(recipe.ablations)) < len(recipe.ablations):
        raise RecipeError(str(path), "names one of them twice", place="$.ablations")
    _check_names(recipe, path)
    return recipe


def check_numbers(recipe: Recipe, numbers: Sequence[int], name: str) -> None:
    """Raise `RecipeError` for the number of a case, counted from 1, that a recipe `name` lacks."""
    for number in numbers:
        if not 1 <= number <= len(recipe.case):
            raise RecipeError(name, f"no case {number}: cases are numbered 1 to {len(recipe.case)}")


def _check_names(recipe: Recipe, path: Path) -> None:
    """Raise `RecipeError` for two cases of one trace name: traces, predictions and results of both would be one."""
    cases: dict[str, tuple[int, Case]] = {}
    for index, case in enumerate(recipe.case):
        given = None if case.trace is None else bundled_traces().get(case.trace, Path(case.trace))
        name = f"{case.trace_name}.json.gz" if given is None else given.name
        first, other = cases.setdefault(name, (index, case))
        if other != case:
            problem = f"has the same trace name as $.case[{first}]: '{name}'; their traces and results would be one"
            raise RecipeError(str(path), problem, place=f"$.case[{index}]")


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
    if recipe.optimizes and case.trace is not None:
        which = "against" if recipe.against else "ablations"
        return f"a recipe with '{which}' optimizes models; give 'spec' in place of 'trace'"
    if case.against and not recipe.against:
        return "'against' of a case goes with 'against' of the recipe"
    return ""
