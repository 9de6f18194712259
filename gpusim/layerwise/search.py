"""The layer-wise plan: which configurations take part, their costs, and the exact search."""

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


@dataclass(frozen=True, slots=True)
class Searched:
    """The best plan by the sum of costs, what is known about it, and the next best ones."""

    choice: Choice
    cost_ns: float
    bound_ns: float
    exact: bool
    kernel_layers: int
    """Layers left after eliminations."""
    configurations: int
    """Of all layers together, of those that take part."""
    ranked: tuple[tuple[float, Choice], ...]
    """The best plans and their costs, the best first."""


def additive_ns(problem: Problem, choices: Sequence[Choice]) -> list[float]:
    """The cost of plans by the sum over layers and edges."""
    configs = [tuple(dict.fromkeys(choice[index] for choice in choices)) for index in range(len(problem.graph))]
    costs = tables(problem, configs)
    return [
        cost_of(costs.nodes, costs.edges, [configs[index].index(config) for index, config in enumerate(choice)])
        for choice in choices
    ]


def search(problem: Problem, *, count: int = 1, memory_limit_bytes: int | None = None) -> Searched:
    """The best plan, or the `count` best ones, on at most so much memory of each GPU.

    Raises `OptionError` where no plan fits.
    """
    options, all_of_them = worth_looking_at(problem)
    costs = tables(problem, options)
    if memory_limit_bytes is None:
        solution = solve(costs.nodes, costs.edges)
        ranked = k_best(costs.nodes, costs.edges, count) if count > 1 else []
    else:
        solution = solve_within(costs.nodes, costs.edges, layer_memories(problem, costs), memory_limit_bytes)
        ranked = []
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


#: Most configurations of a layer that all take part: 64 GPUs have 210. Of more, the `FEWER` most promising ones do.
MOST_CONFIGS: Final = 256
FEWER: Final = 96


def worth_looking_at(problem: Problem) -> tuple[list[tuple[Config, ...]], bool]:
    """Configurations of each layer that take part, and whether these are all of them.

    Of too many, those with the least cost of the layer and of what it lacks where the layer before is split alike;
    those of the fixed plans are always among them.
    """
    plans = [plan(problem.graph, problem.gpus) for plan in FIXED_PLANS.values()]
    chosen: list[tuple[Config, ...]] = []
    all_of_them = True
    for index, some in enumerate(_options(problem)):
        if len(some) > MOST_CONFIGS:
            all_of_them = False
            promise = {c: layer_cost(problem, index, c).total_ns + _lacking_ns(problem, index, c) for c in some}
            best = {*sorted(some, key=promise.__getitem__)[:FEWER], *(plan[index] for plan in plans), REPLICATED}
            some = tuple(config for config in some if config in best)
        chosen.append(some)
    return chosen, all_of_them


def _options(problem: Problem) -> list[tuple[Config, ...]]:
    """All configurations of each layer. Beside layers without a rule, others may be computed by every GPU, too."""
    ruled = all(layer.splits for layer in problem.graph.layers)
    return [
        (*layer_configs(layer, problem.gpus), *(() if ruled or not layer.splits else (REPLICATED,)))
        for layer in problem.graph.layers
    ]


def _lacking_ns(problem: Problem, index: int, config: Config) -> float:
    """Time to bring what a share needs beyond an even part of its inputs."""
    size = problem.graph.layers[index].element_bytes * lacking_elements(problem, index, config)
    return 2 * float(exchange_ns(problem.topology, np.array([float(size)]), np.zeros(1), config.parts)[0])


def _least_ns(problem: Problem) -> float:
    """No plan takes less: each layer at its best, and nothing moved."""
    return sum(
        min(layer_cost(problem, index, config).total_ns for config in some)
        for index, some in enumerate(_options(problem))
    )


def chosen(costs: Tables, numbers: Iterable[int]) -> Choice:
    """The configurations that a choice of numbers stands for."""
    return tuple(some[number] for some, number in zip(costs.configs, numbers, strict=True))
