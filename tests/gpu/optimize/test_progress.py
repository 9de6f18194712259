"""Times of an optimization's stages: what each takes by itself, and all of them together."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch

from gpusim.gpu.optimize import make
from gpusim.gpu.optimize.progress import Progress
from tests.support.optimizing import fast, net


@pytest.fixture
def progress() -> tuple[Progress, list[str], Callable[[float], None]]:
    """A clock that only the test moves."""
    now, said = [100.0], list[str]()

    def wait(seconds: float) -> None:
        now[0] += seconds

    return Progress(said.append, lambda: now[0]), said, wait


def test_a_stage_within_another_counts_by_itself(progress: tuple[Progress, list[str], Callable[[float], None]]) -> None:
    """2 s, 5 s inside, 1 s again outside; 7 s between stages count for none; a second turn adds up."""
    told, said, wait = progress
    with told.stage("cache"):
        wait(2)
        with told.stage("lowering"):
            wait(5)
        wait(1)
    wait(7)
    with told.stage("lowering"):
        wait(0.5)
    assert told.seconds == {"cache": 3.0, "lowering": 5.5}
    assert told.text == "seconds by stage: cache 3.0, lowering 5.5"
    told("a message")
    assert said == ["a message"]


def test_a_stage_that_fails_counts_and_ends(progress: tuple[Progress, list[str], Callable[[float], None]]) -> None:
    told, _, wait = progress

    def fail() -> None:
        wait(4)
        raise ValueError("an error of the step")

    with pytest.raises(ValueError, match="of the step"), told.stage("check"):
        fail()
    wait(3)
    assert told.seconds == {"check": 4.0}
    told.begin()
    assert told.text == "seconds by stage: none"


def test_an_optimized_step_says_where_its_time_went() -> None:
    lines: list[str] = []
    step = fast(net(), torch.randn(2, 6), say=lines.append)
    stages = set(step.gain.stages_s)
    assert {"eager", "recording", "cache", "compiling", "profiling", "search", "trial", "check"} <= stages
    assert lines[-1].startswith("seconds by stage: ")
    assert all(seconds >= 0 for seconds in step.gain.stages_s.values())


def test_the_engine_is_compiled_while_kernels_are_lowered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not beside the user's step, which may need the same cores; and it is ready before the first prediction."""
    said: list[str] = []

    @contextmanager
    def compiling(_: object) -> Iterator[Callable[[], None]]:
        said.append("begins")
        yield lambda: said.append("waits")

    monkeypatch.setattr(make, "compiling_ahead", compiling)
    step = fast(net().eval(), torch.randn(2, 6), say=said.append)
    wanted = ["recording its operators", "begins", "waits", "searching"]
    assert [text for text in said if text in wanted] == wanted
    assert "engine" in step.gain.stages_s
