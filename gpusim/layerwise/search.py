"""The layer-wise plan: candidate configurations, their costs, and the exact search."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from gpusim.layerwise.configs import REPLICATED, Config, layer_configs
from gpusim.layerwise.costs import (
    Problem,
    Tables,
    exchange_ns,
    lacking_elements,
    layer_cost,
    layer_memories,
    tables,
)
from gpusim.layerwise.eliminate import cost_of, solve
from gpusim.layerwise.fixed_plans import FIXED_PLANS, Choice
from gpusim.layerwise.k_best import k_best
from gpusim.layerwise.memory_limit import solve_within
from gpusim.notebook import ShortRepr


@dataclass(frozen=True, slots=True, repr=False)
class Searched(ShortRepr):
    """The best plan by sum of costs, with its bound, and the next best ones."""

    choice: Choice
    cost_ns: float
    bound_ns: float
    exact: bool
    kernel_layers: int
    """Layers left after elimination."""
    configurations: int
    """Number of candidate configurations of all layers."""
    ranked: tuple[tuple[float, Choice], ...]
    """The best plans with their costs, the best first."""


def additive_ns(problem: Problem, choices: Sequence[Choice]) -> list[float]:
    """Return the costs of plans, as sums over layers and edges."""
    configs = [tuple(dict.fromkeys(choice[index] for choice in choices)) for index in range(len(problem.graph))]
    costs = tables(problem, configs)
    return [
        cost_of(costs.nodes, costs.edges, [configs[index].index(config) for index, config in enumerate(choice)])
        for choice in choices
    ]


def search(problem: Problem, *, count: int = 1, memory_limit_bytes: int | None = None) -> Searched:
    """Return the best plan, or the `count` best ones, within a memory limit for each GPU.

    A plan that is not proved best costs no more than any fixed plan that fits. Raises `OptionError` if no plan fits.
    """
    options, all_of_them = worth_looking_at(problem)
    costs = tables(problem, options)
    fixed = [
        tuple(some.index(config) for some, config in zip(options, plan(problem.graph, problem.gpus), strict=True))
        for plan in FIXED_PLANS.values()
    ]
    ranked = []
    if memory_limit_bytes is None:
        solution = solve(costs.nodes, costs.edges, known=fixed)
        if count > 1 and solution.kernel <= 2:
            ranked = k_best(costs.nodes, costs.edges, count)
    else:
        solution = solve_within(costs.nodes, costs.edges, layer_memories(problem, costs), memory_limit_bytes, fixed)
    following = [(each.cost_ns, chosen(costs, each.choice)) for each in ranked]
    best = chosen(costs, solution.choice)
    return Searched(
        best,
        solution.cost_ns,
        solution.bound_ns if all_of_them else min(solution.bound_ns, _least_ns(problem)),
        solution.exact and all_of_them,
        solution.kernel,
        sum(len(some) for some in costs.configs),
        tuple(following) or ((solution.cost_ns, best),),
    )


#: Most configurations of a layer that are all candidates: 64 GPUs have 210. Of more, the `FEWER` most promising are.
MOST_CONFIGS: Final = 256
FEWER: Final = 96


def worth_looking_at(problem: Problem) -> tuple[list[tuple[Config, ...]], bool]:
    """Return the candidate configurations of each layer, and whether these are all of them.

    Of too many, it keeps those with the least cost of the layer and of the inputs that it lacks if the previous layer
    is split alike, and those of the fixed plans.
    """
    plans = [plan(problem.graph, problem.gpus) for plan in FIXED_PLANS.values()]
    chosen: list[tuple[Config, ...]] = []
    all_of_them = True
    for index, some in enumerate(_options(problem)):
        if len(some) > MOST_CONFIGS:
            all_of_them = False
            lacking_ns = _lacking_ns(problem, index, some)
            promise = {c: layer_cost(problem, index, c).total_ns + lacking_ns[c] for c in some}
            best = {*sorted(some, key=promise.__getitem__)[:FEWER], *(plan[index] for plan in plans), REPLICATED}
            some = tuple(config for config in some if config in best)
        chosen.append(some)
    return chosen, all_of_them


def _options(problem: Problem) -> list[tuple[Config, ...]]:
    """All configurations of each layer.

    Every GPU may compute a layer whole if they get the same, and any layer if one has no rule.
    """
    layers, gpus = problem.graph.layers, problem.gpus
    ruled = all(layer.splits for layer in layers)
    more = [layer.splits and (not ruled or (gpus > 1 and problem.repeated and layer.repeats)) for layer in layers]
    return [
        (*layer_configs(layer, gpus), *((REPLICATED,) if may else ())) for layer, may in zip(layers, more, strict=True)
    ]


def _lacking_ns(problem: Problem, index: int, some: Sequence[Config]) -> dict[Config, float]:
    """Time for each configuration to fetch the inputs that a share needs beyond an even part of them."""
    size = problem.graph.layers[index].element_bytes
    times_ns: dict[Config, float] = {}
    for parts in {config.parts for config in some}:
        alike = [config for config in some if config.parts == parts]
        moved = np.array([float(size * lacking_elements(problem, index, config)) for config in alike])
        sums_ns = 2 * exchange_ns(problem.topology, moved, np.zeros(len(alike)), parts)
        times_ns |= zip(alike, sums_ns.tolist(), strict=True)
    return times_ns


def _least_ns(problem: Problem) -> float:
    """Lower bound on any plan's time: each layer at its best, and no transfers."""
    return sum(
        min(layer_cost(problem, index, config).total_ns for config in some)
        for index, some in enumerate(_options(problem))
    )


def chosen(costs: Tables, numbers: Iterable[int]) -> Choice:
    """Return the configurations with these indices."""
    return tuple(some[number] for some, number in zip(costs.configs, numbers, strict=True))
