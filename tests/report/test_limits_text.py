"""Limits of a step in words."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpusim.analysis.limits import Limits, Loss, Scope, limits
from gpusim.analysis.relaxed import CONTENTION, DEPENDENCIES, LIMITS, SMS
from gpusim.formats.hardware import load_hardware
from gpusim.report.figures.limits import limits_figure
from gpusim.report.limits_text import MEANING, limits_sentences
from tests.support.helpers import build_graph, wide_trace


@pytest.fixture(scope="module")
def found() -> Limits:
    return limits(build_graph(wide_trace(), load_hardware("h200")), streams=2)


@pytest.fixture(scope="module")
def scope(found: Limits) -> Scope:
    """1,000 ns in sequence, 200 ns for the longest op: 300 ns lost to dependencies, 100 to SMs, 8 to contention."""
    losses = (Loss(DEPENDENCIES, 500, 300), Loss(SMS, 600, 100), Loss(CONTENTION, 608, 8))
    return replace(found.scopes[-1], sequential_ns=1000, unlimited_ns=200, losses=losses)


def test_sentences_say_what_is_won_and_the_two_largest_losses(scope: Scope) -> None:
    won, first, second = limits_sentences(scope)
    assert won == "The best list schedule wins 49% of what there is to win."
    assert first == f"38% is lost to dependencies: {MEANING[DEPENDENCIES]}."
    assert second == f"12% is lost to SM resources: {MEANING[SMS]}."


def test_small_losses_are_not_named(scope: Scope) -> None:
    small = (Loss(CONTENTION, 208, 8), Loss(SMS, 210, 2))
    assert limits_sentences(replace(scope, losses=small)) == [
        "The best list schedule wins 99% of what there is to win."
    ]


def test_a_step_of_one_op_has_nothing_to_win(scope: Scope) -> None:
    [sentence] = limits_sentences(replace(scope, sequential_ns=200, losses=()))
    assert "nothing to win" in sentence


def test_every_limit_has_a_meaning() -> None:
    assert set(MEANING) == set(LIMITS)


def test_narrow_waterfalls_leave_room_for_their_labels(found: Limits, scope: Scope) -> None:
    """At 1,280 pixels a panel of four is some 160 wide, a label such as `5,060 us` some 60."""
    figure = limits_figure(replace(found, scopes=(scope,) * 4))
    for number in range(2, 6):
        low, high = figure.layout[f"xaxis{number}"].range
        assert (low, high) == (0, pytest.approx(1.7 * 1.0))
