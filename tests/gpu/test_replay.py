"""Replay without a GPU: comparison of results, refusals and their order, no GPU, no memory."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import torch

from gpusim.errors import GpuError, OperatorError, ReplayError, ScheduleError
from gpusim.formats.hardware import load_hardware
from gpusim.formats.measurement import SCHEMA, Measurement, OutputCheck, read_measurement, write_measurement
from gpusim.formats.trace import Gpu, Timing, Trace
from gpusim.gpu.replay import replay as replay_module
from gpusim.gpu.replay.compare import (
    NO_NOISE,
    NOT_FINITE,
    TOLERANCE,
    Comparison,
    check_same_kernels,
    compare,
    distance,
    errors,
)
from gpusim.gpu.replay.execute import results_of
from gpusim.gpu.replay.replay import replay, require_equal
from gpusim.plan.schedule import write_schedule
from gpusim.trace.store import write_trace
from tests.support.helpers import build_graph, chain_trace, kernel, schedule_of
from tests.support.networks import CPU, on_cpu

ROOT = Path(__file__).parents[2]
TRACE = chain_trace(3)
EXACT = Comparison(bit_equal=True, worst_error=0.0, compared=1)


def tensors(*values: list[float]) -> dict[int, torch.Tensor]:
    return {index: torch.tensor(value) for index, value in enumerate(values)}


# --- Comparing results ---


def test_equal_results_are_bit_equal() -> None:
    found = compare(TRACE, tensors([1.0, 2.0], [0.0]), tensors([1.0, 2.0], [0.0]))
    assert found == Comparison(bit_equal=True, worst_error=0.0, compared=2)


def test_error_is_relative_and_that_of_the_worst_tensor() -> None:
    found = compare(TRACE, tensors([3.0, 4.5], [1.01]), tensors([3.0, 4.0], [1.0]))
    assert not found.bit_equal
    assert found.worst_error == pytest.approx(0.1)


@pytest.mark.parametrize("value", [0.25, 1e-12])
def test_result_that_is_zero_whatever_is_rounded_may_be_nothing_else(value: float) -> None:
    assert compare(TRACE, tensors([value]), tensors([0.0])).worst_error == NOT_FINITE
    assert compare(TRACE, tensors([-0.0]), tensors([0.0])).worst_error == 0.0


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_reference_that_is_not_finite_is_an_error_that_names_the_tensor(value: float) -> None:
    """NaN equals nothing, and anything is close to infinity: there is no reference."""
    with pytest.raises(ReplayError, match=r"not finite in a0; nothing to compare with"):
        compare(TRACE, tensors([1.0], [1.0]), tensors([1.0], [value]))


def test_result_that_is_not_finite_fails_every_tolerance_and_fits_into_json() -> None:
    found = compare(TRACE, tensors([float("nan")]), tensors([1.0]))
    assert found.worst_error == NOT_FINITE
    check = check_same_kernels(TRACE, tensors([float("nan")]), tensors([1.0]), EXACT)
    assert not check.equal
    assert b"null" not in msgspec.json.encode(check)


def test_equal_infinities_do_not_differ_and_hide_no_other_error() -> None:
    inf, one, far = math.inf, torch.tensor([1.0]), torch.tensor([math.inf])
    assert distance(torch.tensor([inf, -inf, 3.0]), torch.tensor([inf, -inf, -1.0])) == 4.0
    assert distance(far, -far) == distance(one, far) == inf
    assert math.isnan(distance(one * math.nan, one * math.nan))
    apart = errors(TRACE, tensors([inf, 5.0]), tensors([inf, 4.0]), NO_NOISE, 1e-3)
    assert apart == {0: 0.25}  # over the finite elements: an infinite norm would make it 0


def test_missing_result_is_an_error() -> None:
    with pytest.raises(ReplayError, match="did not produce tensor 1"):
        compare(TRACE, tensors([1.0]), tensors([1.0], [2.0]))


def test_integer_results_are_compared_too() -> None:
    found = compare(TRACE, {0: torch.tensor([1, 2])}, {0: torch.tensor([1, 3])})
    assert not found.bit_equal
    assert found.worst_error > 0


def of_dtype(dtype: str) -> Trace:
    model = msgspec.structs.replace(TRACE.model, dtype=dtype)  # type: ignore[arg-type]
    return msgspec.structs.replace(TRACE, model=model)


@pytest.mark.parametrize("dtype", ["fp32", "tf32", "bf16"])
def test_tolerance_is_named_by_dtype(dtype: str) -> None:
    limit = TOLERANCE[dtype]  # type: ignore[index]
    for error, equal in ((limit * 0.5, True), (limit * 2.0, False)):
        check = check_same_kernels(of_dtype(dtype), tensors([1.0 + error]), tensors([1.0]), EXACT)
        assert (check.equal, check.bit_equal, check.tolerance) == (equal, False, limit)


def test_tolerance_grows_with_what_two_sequential_runs_differ_by() -> None:
    """Atomic additions come in any order: a schedule need not be closer than two sequential runs are."""
    repeated = Comparison(bit_equal=False, worst_error=0.01, compared=1)
    check = check_same_kernels(TRACE, tensors([1.02]), tensors([1.0]), repeated)
    assert check.equal
    assert (check.tolerance, check.sequential_error, check.sequential_repeats) == (0.03, 0.01, False)
    assert not check_same_kernels(TRACE, tensors([1.05]), tensors([1.0]), repeated).equal


def test_what_is_compared_are_outputs_gradients_and_changed_states() -> None:
    found = on_cpu("branches")
    runner = found.rerun()
    runner.run_in_order()
    results = results_of(found.trace, runner.tensors)
    roles = {found.trace.tensors[index].role for index in results}
    assert roles == {"output", "gradient", "parameter", "buffer", "optimizer_state"}
    names = {found.trace.tensors[index].name for index in results}
    assert {"stem.1.running_mean", "momentum.head.weight", "head.bias"} <= names
    again = {index: tensor.clone() for index, tensor in results.items()}
    assert compare(found.trace, again, results).bit_equal
    for tensor in runner.tensors:
        if tensor is not None and tensor.is_floating_point():
            tensor.detach().zero_()
    assert compare(found.trace, again, results).bit_equal, "results are copies"


# --- The measurement ---


def measurement(equal: bool) -> Measurement:
    gpu = Gpu(name="g", driver="1", cuda="1", torch="1", cudnn="1", sm_clock_mhz=1, mem_clock_mhz=1)
    outputs = OutputCheck(
        equal=equal,
        bit_equal=False,
        sequential_repeats=True,
        worst_error=0.5,
        sequential_error=0.0,
        tolerance=1e-3,
        compared=4,
    )
    return Measurement(
        schema=SCHEMA,
        trace="tiny-infer-b1",
        trace_hash="0",
        policy="wavefront",
        streams=4,
        schedule=Timing(median_ns=800, lo_ns=790, hi_ns=810, rounds=24),
        sequential=Timing(median_ns=1000, lo_ns=990, hi_ns=1010, rounds=24),
        predicted_ns=880,
        predicted_sequential_ns=950,
        hardware="h200",
        outputs=outputs,
        peak_bytes=1,
        sequential_peak_bytes=1,
        events=3,
        gpu=gpu,
        date="2025-01-01",
        command="c",
    )


def test_different_outputs_are_an_error_and_equal_ones_are_not() -> None:
    require_equal(measurement(equal=True))
    with pytest.raises(ReplayError) as caught:
        require_equal(measurement(equal=False))
    assert "\n" not in str(caught.value)
    assert "0.5" in str(caught.value)


def test_measurement_survives_its_file_and_knows_its_errors(tmp_path: Path) -> None:
    found = measurement(equal=True)
    write_measurement(found, tmp_path / "m.json")
    assert read_measurement(tmp_path / "m.json") == found
    assert (found.speedup, found.prediction_error, found.sequential_error) == pytest.approx((1.25, 0.1, -0.05))


# --- What is refused, and before what ---


def runnable() -> Trace:
    """Make a trace whose operators are allowed, with synthetic kernels."""
    trace = on_cpu("outputs", "infer").trace
    ops = (msgspec.structs.replace(op, kernels=(kernel(1000),)) if op.writes else op for op in trace.ops)
    return msgspec.structs.replace(trace, ops=tuple(ops))


def test_replay_in_python_refuses_operator_and_schedule_before_it_touches_the_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(replay_module, "require_gpu", lambda: CPU)
    with pytest.raises(OperatorError, match=r"\$\.ops\[0\]\.target: operator 'aten\.test\.default'"):
        replay(build_graph(TRACE, load_hardware("h200")), [])
    trace = runnable()
    n = len(trace.ops)
    wrong = schedule_of(range(n)[::-1], [0] * n)
    with pytest.raises(ScheduleError, match="order against the dependencies"):
        replay(build_graph(trace, load_hardware("h200")), [wrong])


def test_replay_out_of_memory_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has ...")

    monkeypatch.setattr(replay_module, "require_gpu", lambda: CPU)
    monkeypatch.setattr(replay_module, "set_precision", lambda dtype: None)
    monkeypatch.setattr(replay_module, "make_initial", full)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (2**30, 2**33))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 2**32)
    with pytest.raises(GpuError, match=r"^GPU out of memory: .*try a smaller batch or fewer streams") as caught:
        replay(build_graph(runnable(), load_hardware("h200")), [])
    assert "\n" not in str(caught.value)


def gpusim(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command line on a machine whose GPUs are hidden."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "gpusim", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def refusal(*arguments: str) -> str:
    """Return the single line on standard error of a command that exits with 2 and prints nothing."""
    done = gpusim(*arguments)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.startswith("gpusim: ")
    return done.stderr


def test_operator_outside_the_list_is_refused_before_the_gpu_is_looked_for(tmp_path: Path) -> None:
    path = tmp_path / "hostile.json"
    write_trace(TRACE, path)
    text = refusal("replay", "--trace", str(path), "--policy", "wavefront")
    assert f"{path}: $.ops[0].target: operator 'aten.test.default' is not on the allow-list" in text


def test_illegal_schedule_is_refused_before_the_gpu_is_looked_for(tmp_path: Path) -> None:
    trace, schedule = tmp_path / "t.json", tmp_path / "s.json"
    write_trace(runnable(), trace)
    n = len(runnable().ops)
    write_schedule(schedule_of(range(n)[::-1], [0] * n), runnable(), schedule)
    assert f"{schedule}: $.placements[" in refusal("replay", "--trace", str(trace), "--schedule", str(schedule))


def test_without_a_gpu_replay_is_one_line_and_writes_nothing(tmp_path: Path) -> None:
    path, output = tmp_path / "t.json", tmp_path / "m.json"
    write_trace(runnable(), path)
    text = refusal("replay", "--trace", str(path), "--policy", "wavefront", "-o", str(output), "--json")
    assert text.startswith("gpusim: no GPU: ")
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("command", ["capture", "calibrate"])
def test_without_a_gpu_the_other_commands_are_one_line_too(command: str, tmp_path: Path) -> None:
    wanted = ("tests/support/networks.py:outputs", "--mode", "infer", "--batch", "1") if command == "capture" else ()
    assert refusal(command, *wanted, "-o", str(tmp_path / "out.json")).startswith("gpusim: no GPU: ")
    assert not list(tmp_path.iterdir())
