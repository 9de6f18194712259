"""The cache of schedules: a second start does not search; broken or foreign entries are skipped with a warning."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F  # noqa: N812  (torch's own habit)

from gpusim.errors import GpuError
from gpusim.formats.trace import Trace
from gpusim.gpu.optimize import cache, choose
from gpusim.gpu.optimize.callable import OptimizedStep
from gpusim.gpu.optimize.captured import Captured
from gpusim.gpu.optimize.executors import CpuExecutor, Ready
from gpusim.plan.schedule import Schedule
from tests.support.optimizing import batches, close, fast, net

X = batches(1)[0][0]


class Counted(CpuExecutor):
    """Executor that counts measurements of a step, the first part of a search."""

    measurements = 0

    def measured(self, captured: Captured, eager_ns: int, say: Callable[[str], None]) -> Any:
        type(self).measurements += 1
        return super().measured(captured, eager_ns, say)


class OtherGpu(Counted):
    def facts(self) -> dict[str, str]:
        return {**super().facts(), "gpu": "another"}


class NotAtOnce(Counted):
    """Executor that cannot prepare the first schedule it is given."""

    refused = False

    def prepare(self, captured: Captured, trace: Trace, schedule: Schedule) -> Ready:
        if not self.refused:
            self.refused = True
            raise GpuError("out of something")
        return super().prepare(captured, trace, schedule)


@pytest.fixture(autouse=True)
def _from_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Counted, "measurements", 0)
    monkeypatch.setattr(OtherGpu, "measurements", 0)


def entries(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache").glob("*.json"))


def test_the_second_start_searches_nothing_and_computes_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = fast(net().eval(), X, executor=Counted())
    assert len(entries(tmp_path)) == 1
    monkeypatch.setattr(choose, "explore", lambda *_, **__: pytest.fail("searched again"))
    model = net(seed=4).eval()  # other weights, the same step
    second = fast(model, X, executor=Counted())
    assert Counted.measurements == 1
    assert not {"profiling", "variants", "search", "trial"} & second.gain.stages_s.keys()
    assert second.gain.decided_by == "what was found before"
    assert (second.gain.streams, second.gain.policy) == (first.gain.streams, first.gain.policy)
    with torch.no_grad():
        close(second(X), model(X))


@pytest.mark.parametrize("options", [{"streams": 2}, {"memory_limit_bytes": 1 << 30}, {"executor": OtherGpu()}])
def test_what_was_made_for_something_else_is_not_used(tmp_path: Path, options: dict[str, Any]) -> None:
    fast(net().eval(), X, executor=Counted())
    fast(net().eval(), X, **{"executor": Counted(), **options})
    assert len(entries(tmp_path)) == 2
    assert Counted.measurements + OtherGpu.measurements == 2


def test_a_deterministic_start_uses_nothing_that_need_not_be(tmp_path: Path) -> None:
    """Kernels of such a start may add atomically, in any order."""
    fast(net().eval(), X, executor=Counted())
    torch.use_deterministic_algorithms(True)
    try:
        fast(net().eval(), X, executor=Counted())
    finally:
        torch.use_deterministic_algorithms(False)
    assert Counted.measurements == len(entries(tmp_path)) == 2


def test_a_schedule_found_before_must_keep_the_limit_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Libraries may take other workspaces at the second start."""
    model = net().eval()
    limit = fast(model, X).gain.peak_bytes
    fast(model, X, memory_limit_bytes=limit)
    tried: list[Ready] = []

    class Larger(CpuExecutor):
        def prepare(self, captured: Captured, trace: Trace, schedule: Schedule) -> Ready:
            ready = super().prepare(captured, trace, schedule)
            if not tried:
                monkeypatch.setattr(ready, "peak_bytes", limit + 1)
            tried.append(ready)
            return ready

    step = fast(model, X, memory_limit_bytes=limit, executor=Larger())
    assert len(tried) > 1
    assert step.gain.decided_by != "what was found before"
    assert step.gain.peak_bytes <= limit


def test_other_shapes_and_training_have_entries_of_their_own(tmp_path: Path) -> None:
    model = net()
    fast(model, batches(1)[0], loss=F.cross_entropy, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    fast(model.eval(), X)
    fast(model, batches(1, size=2)[0][0])
    assert len(entries(tmp_path)) == 3


def broken(kind: str, document: dict[str, Any]) -> bytes:
    """Return an entry, broken in one way."""
    if kind == "cut off":
        return json.dumps(document).encode()[:100]
    if kind == "another schema":
        document["schema"] = "gpusim-optimized/0"
    elif kind == "another step":
        document["made_for"]["step"] = "0" * 32
    elif kind == "against dependencies":
        document["order"].reverse()
    elif kind == "an op twice":
        document["order"][0] = document["order"][1]
    elif kind == "too many streams":
        document["streams"][0] = 1_000
    elif kind == "an op that is not there":
        document["chosen"] = {"9999": {"name": "x", "settings": {}, "kernels": []}}
    elif kind == "an unknown field":
        document["run"] = "rm"
    return json.dumps(document).encode()


@pytest.mark.parametrize(
    "kind",
    [
        "cut off",
        "another schema",
        "another step",
        "against dependencies",
        "an op twice",
        "too many streams",
        "an op that is not there",
        "an unknown field",
    ],
)
def test_a_broken_entry_is_passed_over_with_a_line_and_replaced(tmp_path: Path, kind: str) -> None:
    fast(net().eval(), X, executor=Counted())
    (path,) = entries(tmp_path)
    whole = path.read_bytes()
    path.write_bytes(broken(kind, json.loads(whole)))
    lines: list[str] = []
    step = fast(net().eval(), X, executor=Counted(), say=lines.append)
    assert isinstance(step, OptimizedStep)
    assert Counted.measurements == 2
    (line,) = [line for line in lines if line.startswith("passed over in the cache")]
    assert "\n" not in line
    assert str(path) in line
    json.loads(path.read_bytes())


def test_a_folder_that_cannot_be_written_is_said_and_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    file.write_text("x")
    monkeypatch.setenv(cache.VARIABLE, str(file / "cache"))
    lines: list[str] = []
    assert isinstance(fast(net().eval(), X, say=lines.append), OptimizedStep)
    assert any(line.startswith("not kept in the cache") for line in lines)


def test_a_folder_that_cannot_be_searched_is_said_and_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its name is too long here; tests may run as a user for whom no folder is closed."""
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path / ("x" * 5_000)))
    lines: list[str] = []
    assert isinstance(fast(net().eval(), X, say=lines.append), OptimizedStep)
    assert any(line.startswith("passed over in the cache") for line in lines)


def test_an_entrys_policy_is_printed_as_one_visible_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fast(net().eval(), X)
    (path,) = entries(tmp_path)
    document = json.loads(path.read_bytes())
    path.write_text(json.dumps({**document, "policy": "\x1b[31m" + "x" * 5_000}))
    capsys.readouterr()
    fast(net().eval(), X)
    (line,) = capsys.readouterr().err.splitlines()
    assert "what was found before" in line
    assert "\x1b" not in line
    assert len(line) < 1_000


def test_an_empty_variable_means_no_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(cache.VARIABLE, "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert isinstance(fast(net().eval(), X), OptimizedStep)
    assert list(tmp_path.iterdir()) == []


def test_a_schedule_that_does_not_run_any_more_is_searched_anew(tmp_path: Path) -> None:
    fast(net().eval(), X, executor=Counted())
    lines: list[str] = []
    step = fast(net().eval(), X, executor=NotAtOnce(), say=lines.append)
    assert "what was found before does not run: out of something" in lines
    assert step.gain.decided_by != "what was found before"


def test_the_oldest_entries_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "MOST_ENTRIES", 2)
    for size in (1, 2, 3, 4):
        fast(net().eval(), torch.randn(size, 6))
    assert len(entries(tmp_path)) == 2
