"""The exact search: eliminations, comparison with enumeration, the k best choices, the memory limit."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from gpusim.errors import OptionError
from gpusim.layerwise.eliminate import cost_of, enumerate_all, lower_bound, solve
from gpusim.layerwise.k_best import k_best, min_marginals
from gpusim.layerwise.memory_limit import solve_within

Problem = tuple[list[np.ndarray], dict[tuple[int, int], np.ndarray]]


def random_problem(random: np.random.Generator, layers: int, density: float = 0.6) -> Problem:
    sizes = random.integers(1, 5, layers)
    nodes = [random.random(size) * 10 for size in sizes]
    edges = {
        (i, j): random.random((sizes[i], sizes[j])) * 10
        for i in range(layers)
        for j in range(i + 1, layers)
        if random.random() < density
    }
    return nodes, edges


def all_costs(nodes: list[np.ndarray], edges: dict[tuple[int, int], np.ndarray]) -> list[float]:
    choices = itertools.product(*[range(len(costs)) for costs in nodes])
    return sorted(cost_of(nodes, edges, choice) for choice in choices)


def test_elimination_equals_enumeration_on_500_random_graphs() -> None:
    random = np.random.default_rng(22)
    irreducible = 0
    for _ in range(500):
        nodes, edges = random_problem(random, int(random.integers(1, 7)))
        found = solve(nodes, edges)
        assert found.exact
        assert found.cost_ns == pytest.approx(enumerate_all(nodes, edges).cost_ns, rel=1e-12)
        assert cost_of(nodes, edges, found.choice) == found.cost_ns
        irreducible += found.kernel > 2
    assert irreducible > 30, "some of them do not reduce to two layers"


def test_a_chain_by_hand() -> None:
    """Two layers of cost (1, 5) and (4, 1), and 10 to change: (1 + 4) beats (5 + 1) and any mix."""
    found = solve([np.array([1.0, 5.0]), np.array([4.0, 1.0])], {(0, 1): np.array([[0.0, 10.0], [10.0, 0.0]])})
    assert (found.choice, found.cost_ns, found.kernel) == ((0, 0), 5.0, 2)


def test_what_does_not_fit_a_table_is_bounded_and_says_so() -> None:
    random = np.random.default_rng(3)
    bounded = 0
    for _ in range(100):
        nodes, edges = random_problem(random, 6, density=0.9)
        best = enumerate_all(nodes, edges).cost_ns
        found = solve(nodes, edges, most_entries=1)
        assert found.bound_ns <= best + 1e-9
        assert found.cost_ns >= best - 1e-9
        assert lower_bound(nodes, edges) <= best + 1e-9
        assert not found.exact or found.cost_ns == pytest.approx(best)
        bounded += not found.exact
    assert bounded > 20


def test_a_bounded_choice_is_no_worse_than_a_known_one() -> None:
    random = np.random.default_rng(17)
    better = 0
    for _ in range(100):
        nodes, edges = random_problem(random, 6, density=0.9)
        best = enumerate_all(nodes, edges)
        without = solve(nodes, edges, most_entries=1)
        found = solve(nodes, edges, most_entries=1, known=[best.choice])
        assert found.cost_ns == pytest.approx(best.cost_ns)
        better += found.cost_ns < without.cost_ns
    assert better > 5


def test_the_k_best_choices_are_those_of_enumeration() -> None:
    """Of three, layers have configurations that are in none of them."""
    random = np.random.default_rng(5)
    checked = 0
    for _ in range(150):
        nodes, edges = random_problem(random, int(random.integers(1, 6)), density=0.4)
        if solve(nodes, edges).kernel > 2:
            continue
        expected = all_costs(nodes, edges)
        for count in (3, 7):
            found = k_best(nodes, edges, count)
            assert [each.cost_ns for each in found] == pytest.approx(expected[:count])
            assert [cost_of(nodes, edges, each.choice) for each in found] == [each.cost_ns for each in found]
            assert len({each.choice for each in found}) == len(found)
        checked += 1
    assert checked > 100


def test_a_min_marginal_is_the_best_choice_with_that_configuration() -> None:
    random = np.random.default_rng(7)
    nodes, edges = random_problem(random, 4, density=0.0)
    edges = {(i, i + 1): random.random((len(nodes[i]), len(nodes[i + 1]))) for i in range(3)}
    found = min_marginals(nodes, edges)
    for layer, costs in enumerate(nodes):
        for config in range(len(costs)):
            choices = itertools.product(*[[config] if i == layer else range(len(c)) for i, c in enumerate(nodes)])
            assert found[layer][config] == pytest.approx(min(cost_of(nodes, edges, c) for c in choices))


def test_a_memory_limit_keeps_and_bounds_the_best_plan_that_fits() -> None:
    random = np.random.default_rng(11)
    exact = refused = 0
    for _ in range(150):
        nodes, edges = random_problem(random, int(random.integers(2, 6)))
        memory = [random.random(len(costs)) * 10 for costs in nodes]
        limit = float(sum(each.mean() for each in memory)) * 0.8
        choices = list(itertools.product(*[range(len(costs)) for costs in nodes]))
        fitting = [
            cost_of(nodes, edges, c) for c in choices if sum(m[k] for m, k in zip(memory, c, strict=True)) <= limit
        ]
        if not fitting:
            with pytest.raises(OptionError, match="no plan fits"):
                solve_within(nodes, edges, memory, limit)  # type: ignore[arg-type]
            refused += 1
            continue
        found = solve_within(nodes, edges, memory, limit)  # type: ignore[arg-type]
        assert sum(m[k] for m, k in zip(memory, found.choice, strict=True)) <= limit
        assert found.bound_ns <= min(fitting) + 1e-6
        assert found.cost_ns >= min(fitting) - 1e-9
        known = solve_within(nodes, edges, memory, limit, choices)  # type: ignore[arg-type]
        assert known.cost_ns == pytest.approx(min(fitting))
        exact += found.exact
    assert exact > 20
    assert refused
