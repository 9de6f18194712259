"""Blocks that have work: those of embedding bags by the shapes of their op, all of other kernels."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from gpusim.formats.trace import Kernel, Op, Tensor
from gpusim.plan.kernels import kernel_tasks
from gpusim.plan.working_blocks import working_blocks
from gpusim.rules import idle_blocks
from gpusim.trace.store import read_trace
from gpusim.validation.chosen import hardware_of

KINDS = Path(__file__).parent.parent.parent / "validate" / "traces" / "kinds"
LOOKUP = "void at::native::(anonymous namespace)::EmbeddingBag_updateOutputKernel_sum_mean<float, long>(long*)"


def lookup(*shapes: tuple[int, ...], name: str = LOOKUP) -> int:
    """Return the working blocks of a kernel of 1,024 blocks of 32 x 8 threads whose op writes these shapes."""
    launch = Kernel(name=name, dur_ns=3000, grid=(1024, 1, 1), block=(32, 8, 1), regs_per_thread=40)
    tensors = [
        Tensor(shape=shape, stride=(1,) * len(shape), dtype="float32", storage=0, role="activation", name="x")
        for shape in shapes
    ]
    op = Op(name="bags", target="aten._embedding_bag.default", writes=tuple(range(len(shapes))), kernels=(launch,))
    return working_blocks(launch, op, tensors)


@pytest.mark.parametrize(
    ("bags", "features", "working"),
    [(64, 32, 8), (64, 33, 16), (48, 64, 12), (96, 64, 24), (1, 1, 1), (0, 64, 1), (4096, 64, 1024), (9999, 64, 1024)],
)
def test_a_row_of_threads_takes_a_bag_and_as_many_features_as_it_has_threads(
    bags: int, features: int, working: int
) -> None:
    assert lookup((bags, features), (6 * bags,), (bags,)) == working


def test_all_blocks_work_in_other_kernels_and_where_shapes_are_unknown() -> None:
    assert lookup((64, 32), name="void at::native::reduce_kernel<512, 1>()") == 1024
    assert lookup() == 1024
    assert lookup((64,)) == 1024


def test_idle_blocks_of_a_captured_step_take_part_of_their_kernels_time() -> None:
    trace = read_trace(KINDS / "recommendation_small-infer-b64.json.gz")
    hardware = hardware_of(trace)
    idle_ns = idle_blocks.time_ns(hardware.contention, 1024, 6, hardware.limits.sms)
    tasks = [task for of_op in kernel_tasks(trace, hardware) for task in of_op]
    lookups = [task for task in tasks if "EmbeddingBag" in task.name]
    assert len(lookups) == 16
    for task in lookups:
        assert (task.blocks, task.blocks_per_sm, task.idle_ns) == (8, 6, idle_ns)
        assert 1800 < idle_ns < 2000 < task.dur_ns
    assert {task.idle_ns for task in tasks if "EmbeddingBag" not in task.name} == {0.0}


def test_idle_blocks_take_no_longer_than_their_kernel() -> None:
    trace = read_trace(KINDS / "recommendation_small-infer-b64.json.gz")
    ops = [
        msgspec.structs.replace(op, kernels=tuple(msgspec.structs.replace(k, dur_ns=1000) for k in op.kernels))
        for op in trace.ops
    ]
    short = msgspec.structs.replace(trace, ops=tuple(ops))
    tasks = [task for of_op in kernel_tasks(short, hardware_of(trace)) for task in of_op]
    assert {task.idle_ns for task in tasks if "EmbeddingBag" in task.name} == {1000.0}
