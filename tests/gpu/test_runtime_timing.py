"""Timing and the surroundings of the GPU: intervals, turns, a process of its own, messages without a GPU."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Callable, Iterator

import pytest
import torch

from gpusim.errors import GpuError, OptionError
from gpusim.gpu import device
from gpusim.gpu.device import explain_out_of_memory, require_gpu, set_precision, torch_dtype
from gpusim.gpu.isolate import alone
from gpusim.gpu.replay import timing
from gpusim.gpu.replay.timing import median_interval, pick_typical, time_interleaved, time_typical
from gpusim.plan.schedule import check_streams
from gpusim.units import format_bytes


@pytest.mark.parametrize(
    ("samples", "wanted"),
    [
        ([5], (5, 5, 5)),
        ([3, 1, 2], (2, 1, 3)),
        ([1, 2], (2, 1, 2)),
        (list(range(25)), (12, 7, 18)),  # 0.98 sqrt(25) = 4.9 ranks on either side of 12.5
        (list(range(100, 0, -1)), (50, 41, 61)),
    ],
)
def test_median_and_interval_by_order_statistics(samples: list[int], wanted: tuple[int, int, int]) -> None:
    found = median_interval(samples)
    assert (found.median_ns, found.lo_ns, found.hi_ns) == wanted
    assert found.rounds == len(samples)
    assert found.lo_ns <= found.median_ns <= found.hi_ns


def test_one_wild_round_does_not_move_the_median() -> None:
    assert median_interval([100] * 24 + [10**9]).median_ns == 100


@pytest.fixture
def rounds(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record which contender ran each round; a call takes as many ns as the name's length."""
    seen: list[str] = []

    def one_round(run: Callable[[], str], repeats: int) -> int:
        seen.append(run())
        return len(seen[-1])

    monkeypatch.setattr(timing, "_round", one_round)
    monkeypatch.setattr(timing, "_repeats", lambda run, round_ms: 3)
    return seen


def test_the_hosts_pace_leaves_out_calls_that_wait_for_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    """The call into the empty queue takes 900 ns, those behind the kernel 100 ns, every fifth one waits 5,000 ns."""
    now = [0]
    took = iter([900, *([100, 100, 100, 100, 5000] * 2)])
    held: list[int] = []
    monkeypatch.setattr(timing, "perf_counter_ns", lambda: now[0])
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "_sleep", held.append)

    def work() -> None:
        now[0] += next(took)

    assert timing.host_ns_behind(work) == 100
    assert held == [4 * 900 * 10]  # twice the time of ten such calls, at two cycles a ns


@pytest.mark.parametrize(
    ("alone_ms", "calls", "ns"),
    [
        ([9.9], 2 + 3 * 5, 7.0),  # once to load kernels, once alone, then in rows
        ([10.0, 12.0], 3, 10e6),
        ([60.0, 0.1], 3 + 3 * 5, 7.0),  # the host paused
    ],
)
def test_a_long_call_is_timed_a_few_times_only(
    monkeypatch: pytest.MonkeyPatch, alone_ms: list[float], calls: int, ns: float
) -> None:
    made: list[int] = []
    alone = iter(alone_ms)

    def alone_ns(work: Callable[[], object], repeats: int) -> int:
        for _ in range(repeats):
            work()
        return round(next(alone) * 1e6)

    def in_a_row_ns(work: Callable[[], object], repeats: int) -> float:
        for _ in range(repeats):
            work()
        return 7.0

    monkeypatch.setattr(timing, "_round", alone_ns)
    monkeypatch.setattr(timing, "queued_ns", in_a_row_ns)
    assert timing.brief_ns(lambda: made.append(1)) == ns
    assert len(made) == calls


def test_contenders_take_turns_and_the_first_of_a_round_alternates(rounds: list[str]) -> None:
    found = time_interleaved({"a": lambda: "a", "bb": lambda: "bb"}, rounds=3)
    assert rounds == ["a", "bb", "bb", "a", "a", "bb"]
    assert {name: time.median_ns for name, time in found.items()} == {"a": 1, "bb": 2}
    assert found["a"].rounds == 3


def test_launches_are_made_slow_before_each_contenders_part(rounds: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process may end it at any time: times of one call would then differ by a tenth."""
    monkeypatch.setattr(timing, "make_launches_slow", lambda: rounds.append("slow"))
    time_interleaved({"a": lambda: "a", "bb": lambda: "bb"}, rounds=2)
    assert rounds == ["slow", "slow", "a", "slow", "bb", "slow", "bb", "slow", "a"]
    rounds.clear()
    time_interleaved({"a": lambda: "a"}, rounds=2, launches=lambda: rounds.append("given"))
    assert rounds == ["given", "given", "a", "given", "a"]


class Graph:
    """A recording that takes as many ns as its name's length."""

    def __init__(self, name: str, alive: list[str], peak_bytes: int = 100) -> None:
        alive.append(name)
        self.name, self.alive, self.peak_bytes = name, alive, peak_bytes

    def replay(self) -> str:
        return self.name

    def __del__(self) -> None:
        self.alive.remove(self.name)


def test_recording_of_median_time_is_kept_and_the_others_let_go(
    rounds: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timing, "free_bytes", lambda: 10**9)
    alive: list[str] = []
    names = iter(("aaa", "a", "aaaaa", "aa", "aaaa"))
    found, times = pick_typical(lambda: Graph(next(names), alive), 5)
    assert (found.peak_bytes, times) == (100, [3, 1, 5, 2, 4])
    assert alive == ["aaa"]


def test_of_an_even_number_of_recordings_the_faster_middle_one_is_kept(
    rounds: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The timed recording must be an actual one, not a mean of two."""
    monkeypatch.setattr(timing, "free_bytes", lambda: 10**9)
    alive: list[str] = []
    names = iter(("aaaa", "aa", "a", "aaa"))
    found, _ = pick_typical(lambda: Graph(next(names), alive), 4)
    assert (found.peak_bytes, alive) == (100, ["aa"])


def test_recordings_are_alive_together_so_that_each_lies_elsewhere(
    rounds: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timing, "free_bytes", lambda: 10**9)
    alive: list[str] = []
    seen: list[int] = []

    def make() -> Graph:
        seen.append(len(alive))
        return Graph("a" * len(seen), alive)

    pick_typical(make, 4)
    assert seen == [0, 1, 2, 3]


@pytest.mark.parametrize(("free_bytes", "made"), [(0, 1), (199, 1), (200, 1), (201, 5)])
def test_no_further_recording_is_made_where_twice_its_memory_is_not_free(
    free_bytes: int, made: int, rounds: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One is made in any case: without it there is nothing to time."""
    monkeypatch.setattr(timing, "free_bytes", lambda: free_bytes)  # a recording takes 100
    alive: list[str] = []
    _, times = pick_typical(lambda: Graph(f"a{len(alive)}", alive), 5)
    assert len(times) == made


def test_typical_recordings_are_timed_in_turns_and_the_spread_is_kept(
    rounds: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timing, "free_bytes", lambda: 10**9)
    alive: list[str] = []
    names = {"one": iter(("xxxx", "x", "xx")), "other": iter(("yyyyyyy", "yyyyy", "yyy"))}
    recorders = {name: lambda each=each: Graph(next(each), alive) for name, each in names.items()}
    found = time_typical(recorders, recordings=3, rounds=2)
    assert rounds[-4:] == ["xx", "yyyyy", "yyyyy", "xx"]
    times = {name: (each.fastest_ns, each.median_ns, each.slowest_ns) for name, each in found.items()}
    assert times == {"one": (1, 2, 4), "other": (3, 5, 7)}


def test_what_memory_does_not_hold_together_is_timed_in_groups_with_the_first(
    rounds: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three recordings of 100 fit: with one recording each, the first and one more, then the first and another."""
    alive: list[str] = []
    monkeypatch.setattr(timing, "free_bytes", lambda: 399 - 100 * len(alive))
    most = []

    def recorder(name: str) -> Callable[[], Graph]:
        def make() -> Graph:
            made = Graph(name, alive)
            most.append(len(alive))
            return made

        return make

    found = time_typical({name: recorder(name) for name in ("a", "bb", "ccc", "dddd")}, recordings=1, rounds=2)
    assert {name: each.median_ns for name, each in found.items()} == {"a": 1, "bb": 2, "ccc": 3, "dddd": 4}
    assert max(most) == 2
    assert [name for name in rounds if name != "a"][-4:] == ["dddd"] * 4
    assert alive == []


def test_spread_holds_the_time_that_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The long timing may fall outside the short trials; fastest <= median <= slowest all the same."""
    monkeypatch.setattr(timing, "free_bytes", lambda: 10**9)
    monkeypatch.setattr(timing, "_repeats", lambda run, round_ms: 3)
    for trial, last in ((10, 12), (10, 8)):
        answers = iter([trial] * timing.TRIAL_ROUNDS + [last] * 5)
        monkeypatch.setattr(timing, "_round", lambda run, repeats, answers=answers: next(answers))
        found = time_typical({"": lambda: Graph("a", [])}, recordings=1, rounds=5)[""]
        assert (found.fastest_ns, found.median_ns, found.slowest_ns) == (min(trial, last), last, max(trial, last))


# --- A process of its own ---


def test_work_alone_gives_its_result_and_its_errors() -> None:
    """Our errors keep type and text on their way back."""
    assert alone(int, "12") == 12
    with pytest.raises(OptionError, match="streams=0"):
        alone(check_streams, 0)


def test_process_that_dies_is_a_gpu_error() -> None:
    with pytest.raises(GpuError, match="the process of this step died"):
        alone(os._exit, 3)


# --- The GPU: there or not, out of memory ---


def test_no_gpu_is_one_line_that_says_what_works_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(GpuError, match=r"^no GPU: .* \(explore and simulate need no GPU\)$") as caught:
        require_gpu()
    assert "\n" not in str(caught.value)


def test_out_of_memory_is_one_line_with_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (3 * 2**30, 140 * 2**30))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 120 * 2**30)

    @explain_out_of_memory
    def step(size: int) -> None:
        raise torch.cuda.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {size} GiB.\nGPU 0 has ...")

    with pytest.raises(GpuError) as caught:
        step(20)
    text = str(caught.value)
    assert "\n" not in text
    assert text.startswith("GPU out of memory: at most 120")
    assert f"{format_bytes(3 * 2**30)} of {format_bytes(140 * 2**30)} are free" in text
    assert "try a smaller batch or fewer streams (CUDA out of memory)" in text
    assert step.__name__ == "step"


def test_out_of_memory_within_a_capture_is_explained_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ending a failed capture raises an error of its own, which does not mention memory."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1, 2))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 3)

    @explain_out_of_memory
    def step() -> None:
        try:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 392 MiB.")
        finally:
            raise RuntimeError("CUDA error: capturing stream has unjoined work")

    with pytest.raises(GpuError, match="GPU out of memory"):
        step()


def test_other_errors_pass_the_explanation() -> None:
    @explain_out_of_memory
    def step() -> int:
        raise RuntimeError("something else")

    with pytest.raises(RuntimeError, match="something else"):
        step()
    assert explain_out_of_memory(lambda: 3)() == 3


@pytest.mark.parametrize("answer", ["", "garbage", "GPU-1, 555.1, [N/A], [N/A]", "GPU-2, 555.1, 1980, 3201", OSError()])
def test_clocks_that_cannot_be_read_are_zero(answer: str | OSError, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*_: object, **__: object) -> subprocess.CompletedProcess[str]:
        if isinstance(answer, OSError):
            raise answer
        return subprocess.CompletedProcess([], 0, stdout=answer)

    monkeypatch.setattr(subprocess, "run", run)
    assert device._nvidia_smi("GPU-1") == ("", 0, 0)


def test_clocks_are_those_of_the_current_device_while_it_works(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reading ends only after some work: an idle GPU would show its lowest clock.

    The current device is torch's first here, as with CUDA_VISIBLE_DEVICES=1, and the second of `nvidia-smi`.
    """
    answer = subprocess.CompletedProcess([], 0, stdout="GPU-a, 580.1, 1980, 3201\nGPU-b, 580.1, 345, 3201\n")
    worked = threading.Event()

    def run(*_: object, **__: object) -> subprocess.CompletedProcess[str]:
        assert worked.wait(timeout=60)
        return answer

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(device, "gpu_id", lambda: "GPU-b")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    assert device._while_busy(worked.set) == ("580.1", 345, 3201)


@pytest.fixture
def _precision() -> Iterator[None]:
    """Restore torch's switches; their modules are special, so monkeypatch cannot."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32, cudnn.benchmark
    yield
    matmul.allow_tf32, cudnn.allow_tf32, cudnn.benchmark = before


@pytest.mark.usefixtures("_precision")
def test_dtype_of_a_trace_decides_precision() -> None:
    """TF32 only where the trace has it; no autotuning, which would pick other kernels from run to run."""
    torch.backends.cudnn.benchmark = True
    for dtype, allowed in (("tf32", True), ("fp32", False), ("bf16", False)):
        set_precision(dtype)  # type: ignore[arg-type]
        assert torch.backends.cuda.matmul.allow_tf32 is torch.backends.cudnn.allow_tf32 is allowed
        assert torch.backends.cudnn.benchmark is False
    assert (torch_dtype("bf16"), torch_dtype("tf32")) == (torch.bfloat16, torch.float32)
