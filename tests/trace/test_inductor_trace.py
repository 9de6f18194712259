"""A trace of Inductor's kernels, captured on an H200: data for everything except replay, which requires trust."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from gpusim.errors import TraceError
from gpusim.formats.trace import KERNEL
from gpusim.plan.sync import plan_sync
from gpusim.trace.check import check_trace
from gpusim.trace.dependencies import dependencies
from gpusim.trace.store import read_trace
from tests.support.helpers import make_trace, op
from tests.trace.test_overlap import concat_trace

ROOT = Path(__file__).parents[2]
TRACE = ROOT / "traces" / "googlenet-infer-b1-inductor.json.gz"
#: Imports of torch fail in the child.
WITHOUT_TORCH = "import sys; sys.modules['torch'] = None; from gpusim.cli import main; main()"


def gpusim(*words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "NUMBA_NUM_THREADS": "1"}
    command = [sys.executable, "-c", WITHOUT_TORCH, *words]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=False)


@pytest.mark.parametrize(
    "words",
    [
        ("simulate", str(TRACE), "--policy", "critical_path", "--streams", "4"),
        ("explore", str(TRACE), "--budget", "0.2"),
        ("limits", str(TRACE)),
    ],
)
def test_kernels_are_simulated_without_torch(words: tuple[str, ...]) -> None:
    ended = gpusim(*words)
    assert ended.returncode == 0, ended.stderr
    assert "googlenet" in ended.stdout


def test_replay_refuses_the_code_before_torch_is_imported() -> None:
    ended = gpusim("replay", str(TRACE), "--policy", "sequential")
    assert ended.returncode == 2
    assert "a trace of the front end 'inductor' runs the code in it" in ended.stderr
    assert len(ended.stderr.strip().splitlines()) == 1


def test_trace_has_fused_kernels_and_calls_and_branches_that_need_not_wait() -> None:
    trace = read_trace(TRACE)
    targets = {op.target for op in trace.ops}
    assert {KERNEL, "aten.convolution.default"} <= targets
    preds = dependencies(trace)
    assert any(index and index - 1 not in before for index, before in enumerate(preds))


def test_buffer_that_ops_write_in_parts_is_made_before_the_step_and_given_back_on_the_first_stream() -> None:
    """Its writers do not wait for each other: if one allocated it, the other could write memory still in use."""
    trace = concat_trace()
    sync = plan_sync(trace, dependencies(trace), range(4), [1, 2, 1, 1])
    assert sync.early == (0,)
    assert not any(sync.releases)  # no op of the first stream comes after
    aten = concat_trace("aten")
    assert plan_sync(aten, dependencies(aten), range(4), [1, 2, 1, 1]).early == ()


@pytest.mark.parametrize(("elements", "is_there"), [(256, True), (64, False)])
def test_view_is_there_once_an_op_has_filled_its_memory(elements: int, is_there: bool) -> None:
    """`read` takes a view that `late` writes afterwards: its memory is there if `first` has filled all of it."""
    trace = make_trace([op("first"), op("read", "x"), op("late", "x", "y")])
    first = trace.ops[0].outputs[0]
    assert first is not None
    whole = trace.tensors[first]
    tensors = list(trace.tensors)
    tensors[first] = msgspec.structs.replace(whole, shape=(elements,))
    tensors.append(msgspec.structs.replace(whole, shape=(8,), offset=4))
    view = len(tensors) - 1
    ops = [
        trace.ops[0],
        msgspec.structs.replace(trace.ops[1], args=({"tensor": view},), reads=(view,)),
        msgspec.structs.replace(trace.ops[2], args=({"tensor": view},), reads=(), writes=(view,), outputs=()),
    ]
    model = msgspec.structs.replace(trace.model, frontend="inductor")
    trace = msgspec.structs.replace(trace, ops=tuple(ops), tensors=tuple(tensors), model=model)
    if is_there:
        check_trace(trace, "t.json")
    else:
        with pytest.raises(TraceError, match=f"op 'read' uses tensor {view}, which op 'late' writes"):
            check_trace(trace, "t.json")
