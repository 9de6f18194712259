"""Matching of kernels with ops, on synthetic events in the profiler's format (times in us)."""

from __future__ import annotations

import json
import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from gpusim.errors import CaptureError
from gpusim.gpu import profiling
from gpusim.gpu.profiling import RANGE, ProfiledOps, attribute, exported_events, kernel_of, profiled

Event = dict[str, Any]
THREAD = 7


def annotation(iteration: int, op: int, begin: float, end: float, thread: int = THREAD) -> Event:
    """Make the range around one op's call."""
    name = f"{RANGE}{iteration}:{op}"
    return {"cat": "user_annotation", "name": name, "ts": begin, "dur": end - begin, "tid": thread}


def launch(at: float, correlation: int, category: str = "cuda_runtime", thread: int = THREAD) -> Event:
    """Make the call that launched something."""
    name = {"cuda_runtime": "cudaLaunchKernel", "cuda_driver": "cuLaunchKernelEx"}[category]
    return {"cat": category, "name": name, "ts": at, "dur": 1.0, "tid": thread, "args": {"correlation": correlation}}


def kernel(name: str, correlation: int, dur: float, **args: Any) -> Event:
    """Make a GPU record, some time later and on another track."""
    given = {"grid": [4, 2, 1], "block": [128, 1, 1], "registers per thread": 40, "shared memory": 2048} | args
    event_args = {"correlation": correlation, **given}
    return {"cat": "kernel", "name": name, "ts": 1e6 + correlation, "dur": dur, "tid": 1, "args": event_args}


def memory(kind: str, correlation: int, dur: float, size: int) -> Event:
    args = {"correlation": correlation, "bytes": size}
    return {"cat": f"gpu_{kind}", "name": f"{kind} (Device)", "ts": 1e6, "dur": dur, "tid": 1, "args": args}


def session(
    durations: list[float], names: list[list[str]] | None = None, n_ops: int = 2, category: str = "cuda_runtime"
) -> list[Event]:
    """Make one iteration per duration; in each, op k launches the kernels `names[iteration]` in turn."""
    events: list[Event] = []
    for iteration, dur in enumerate(durations):
        for op in range(n_ops):
            begin = 1000.0 * iteration + 100 * op
            events.append(annotation(iteration, op, begin, begin + 50))
            for index, name in enumerate(names[iteration] if names else [f"k{op}"]):
                correlation = 10_000 * iteration + 100 * op + index
                events.append(launch(begin + 10 + 5 * index, correlation, category))
                events.append(kernel(name, correlation, dur + op))
    return events


def names_of(profile: ProfiledOps) -> list[list[str]]:
    return [[found.name for found in kernels] for kernels in profile.kernels]


def test_kernels_belong_to_the_op_whose_range_holds_their_launch() -> None:
    profile = attribute(session([5.0] * 4), 2)
    assert names_of(profile) == [["k0"], ["k1"]]
    assert (profile.attributed_frac, profile.unattributed) == (1.0, ())


def test_order_of_events_in_the_file_does_not_matter() -> None:
    events = session([5.0] * 4, [["a", "b"]] * 4)
    assert attribute(events[::-1], 2).kernels == attribute(events, 2).kernels
    assert names_of(attribute(events[::-1], 2))[0] == ["a", "b"]  # in the order of launch


def test_driver_launches_count_like_runtime_launches() -> None:
    """cuDNN and Triton launch through the driver."""
    assert names_of(attribute(session([5.0] * 3, category="cuda_driver"), 2)) == [["k0"], ["k1"]]


def test_runtime_call_nested_in_a_driver_call_is_found_by_correlation() -> None:
    """Only one of the nested calls has the kernel's correlation id; others around it change nothing."""
    events = session([5.0] * 3)
    for iteration in range(3):
        outer = launch(1000.0 * iteration + 9, 5_000_000 + iteration)
        events.append(outer | {"name": "cudaGraphLaunch", "dur": 20.0})
        events.append({"cat": "cuda_runtime", "name": "cudaDeviceSynchronize", "ts": 5.0, "dur": 1.0, "tid": THREAD})
    assert names_of(attribute(events, 2)) == [["k0"], ["k1"]]


def test_durations_are_medians_with_spread_in_ns_and_the_first_iteration_is_left_out() -> None:
    profile = attribute(session([99.0, 4.0, 6.5, 5.25, 7.0, 5.0]), 2)
    found = profile.kernels[0][0]
    assert (found.dur_ns, found.lo_ns, found.hi_ns, found.samples) == (5250, 4000, 7000, 5)
    assert profile.kernels[1][0].dur_ns == 6250


def test_percentiles_leave_out_a_tenth_at_each_end() -> None:
    found = kernel_of([kernel("k", i, float(i)) for i in range(1, 21)])
    assert (found.lo_ns, found.dur_ns, found.hi_ns, found.samples) == (3000, 10_500, 18_000, 20)


def test_launch_shape_is_taken_over() -> None:
    found = attribute(session([5.0] * 2), 2).kernels[0][0]
    assert (found.kind, found.grid, found.block) == ("kernel", (4, 2, 1), (128, 1, 1))
    assert (found.regs_per_thread, found.smem_bytes, found.bytes) == (40, 2048, 0)


def test_grid_of_zero_which_the_profiler_gives_for_some_launches_is_one_block() -> None:
    found = kernel_of([kernel("k", 1, 5.0, grid=[0, 0, 0], block=[32, 1, 1])])
    assert found.grid == (1, 1, 1)


@pytest.mark.parametrize("kind", ["memset", "memcpy"])
def test_memory_operations_keep_kind_and_bytes(kind: str) -> None:
    events: list[Event] = []
    for i in range(3):
        events += [annotation(i, 0, 100.0 * i, 100.0 * i + 50), launch(100.0 * i + 1, i), memory(kind, i, 2.0, 4096)]
    ((found,),) = attribute(events, 1).kernels
    assert (found.kind, found.bytes, found.dur_ns, found.grid) == (kind, 4096, 2000, (1, 1, 1))


def test_op_without_kernels_has_none() -> None:
    events = session([5.0] * 3) + [annotation(i, 2, 1000.0 * i + 300, 1000.0 * i + 320) for i in range(3)]
    assert names_of(attribute(events, 3)) == [["k0"], ["k1"], []]


def test_spin_kernel_and_work_outside_the_iterations_do_not_count() -> None:
    events = session([5.0] * 3)
    events += [launch(0.5, 900), kernel("void at::spin_kernel(long)", 900, 1e6)]
    # Restoring the state between iterations: after the last range of one, before the first of the next.
    events += [launch(500.0, 901), kernel("copy", 901, 1e6), launch(99_999.0, 902), kernel("copy", 902, 1e6)]
    profile = attribute(events, 2)
    assert (profile.attributed_frac, profile.unattributed) == (1.0, ())


def lost_between_ops(dur: float) -> list[Event]:
    """Three iterations with a kernel launched between two ops of one."""
    return [*session([1000.0] * 3), launch(1075.0, 77), kernel("stray", 77, dur)]


def test_little_that_is_lost_is_reported() -> None:
    profile = attribute(lost_between_ops(3.0), 2)
    assert profile.unattributed == ("stray",)
    assert profile.attributed_frac == pytest.approx(1 - 3.0 / 6006.0)


@pytest.mark.parametrize("dur", [7.0, 5000.0])
def test_more_than_a_thousandth_lost_is_an_error_that_names_the_kernel(dur: float) -> None:
    with pytest.raises(CaptureError, match=r"only .*% of the GPU time could be tied to an op; left over: stray"):
        attribute(lost_between_ops(dur), 2)


def test_kernel_without_a_launch_call_is_lost() -> None:
    events = [*session([5.0] * 3), kernel("orphan", 12345, 50.0)]
    with pytest.raises(CaptureError, match="left over: orphan"):
        attribute(events, 2)


def test_launch_on_another_thread_is_not_guessed_at() -> None:
    """Ranges of autograd's own thread count, another thread's do not."""
    events = session([5.0] * 3)
    elsewhere = [launch(1010.0, 88, thread=THREAD + 1), kernel("other thread", 88, 50.0)]
    assert names_of(attribute(events + elsewhere, 2)) == [["k0"], ["k1"]]
    assert attribute(events + elsewhere, 2).kernels[0][0].dur_ns == 5000
    ranged = [annotation(i, 2, 1000.0 * i, 1000.0 * i + 50, THREAD + 1) for i in range(3)]
    ranged += [e for i in range(3) for e in (launch(1000.0 * i + 9, 90 + i, thread=THREAD + 1), kernel("b", 90 + i, 2))]
    assert names_of(attribute(events + ranged, 3)) == [["k0"], ["k1"], ["b"]]


def test_session_without_kernels_is_an_error() -> None:
    with pytest.raises(CaptureError, match="saw no kernel"):
        attribute([annotation(0, 0, 0.0, 1.0)], 1)


def test_majority_of_iterations_decides_and_only_theirs_are_counted() -> None:
    """An algorithm search or a lazy initialization may show in one iteration."""
    names = [["a"], ["a"], ["a"], ["b", "a"], ["a"]]
    profile = attribute(session([5.0, 5.0, 6.0, 100.0, 7.0], names), 2)
    assert names_of(profile) == [["a"], ["a"]]
    assert (profile.kernels[0][0].dur_ns, profile.kernels[0][0].samples) == (6000, 3)


def test_no_majority_is_an_error_that_names_the_op() -> None:
    names = [["a"], ["a"], ["b"], ["a"], ["b"]]
    with pytest.raises(CaptureError, match="op 0 launched different kernels in different iterations"):
        attribute(session([5.0] * 5, names), 2)


def test_events_of_one_iteration_are_kept_for_export() -> None:
    assert [event["name"] for event in attribute(session([5.0] * 4), 2).events] == ["k0", "k1"]


def test_events_are_read_from_the_profilers_own_file() -> None:
    events = session([5.0])

    class Session:
        def export_chrome_trace(self, path: str) -> None:
            Path(path).write_text(json.dumps({"traceEvents": events}), encoding="utf-8")

    assert exported_events(Session()) == events


# --- What the profiler says on the terminal ---

CHATTER = (
    "[W1123 07:12:33.123456789 profiler_kineto.cpp:331] Profiler is not initialized: skipping step() invocation",
    "[W collection.cpp:700] Warning: duplicate flow start (function operator())",
    "WARNING:2026-11-23 07:12:33 1234:1234 init.cpp:178] function cbapi->getCuptiStatus() failed",
    "STAGE:2026-11-23 07:12:33 1234:1234 ActivityProfilerController.cpp:314] Completed Stage: Warm Up",
)
ERRORS = (
    "[E1123 07:12:33.1 profiler_kineto.cpp:331] cannot open the device",
    "ERROR:2026-11-23 07:12:33 1234:1234 CuptiActivityApi.cpp:1] insufficient privileges",
    "terminate called after throwing an instance of 'c10::Error'",
)


class Chatty:
    """A profiler whose libraries write to standard error when they start, stop and export."""

    def __init__(self, activities: object) -> None:
        warnings.warn("Profiler won't be using warmup, this can skew profiler results", stacklevel=1)

    def __enter__(self) -> Chatty:
        os.write(2, "\n".join((*CHATTER, ERRORS[0], "")).encode())
        return self

    def __exit__(self, *_: object) -> None:
        os.write(2, "\n".join((*CHATTER, ERRORS[1], "")).encode())

    def export_chrome_trace(self, path: str) -> None:
        os.write(2, "\n".join((*CHATTER, ERRORS[2], "")).encode())
        Path(path).write_text(json.dumps({"traceEvents": [{"name": "a"}]}))


def test_warnings_of_the_profiler_do_not_reach_the_terminal_and_errors_do(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("gpusim.gpu.profiling.profile", Chatty)
    with profiled() as session:
        os.write(2, b"[W1123 07:12:33 Context.cpp:1] of the step, not of the profiler\n")
    assert exported_events(session) == [{"name": "a"}]
    of_the_step = "[W1123 07:12:33 Context.cpp:1] of the step, not of the profiler"
    assert capfd.readouterr().err.splitlines() == [ERRORS[0], of_the_step, ERRORS[1], ERRORS[2]]


def test_error_within_a_session_ends_it_and_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpusim.gpu.profiling.profile", Chatty)
    with pytest.raises(CaptureError, match="lost"), profiled():
        raise CaptureError("lost")


def test_torchs_own_profiler_is_silent_without_a_gpu(capfd: pytest.CaptureFixture[str]) -> None:
    with profiled() as session:
        torch.ones(3).sum()
    assert any(event.get("name") == "aten::sum" for event in exported_events(session))
    assert capfd.readouterr().err == ""


def test_only_one_place_starts_the_profiler() -> None:
    gpu = Path(profiling.__file__).parent
    users = [path.name for path in gpu.rglob("*.py") if "ProfilerActivity" in path.read_text(encoding="utf-8")]
    assert users == ["profiling.py"]
