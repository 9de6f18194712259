"""A small training step for the tests of memory plans, with sizes that are easy to add up."""

from __future__ import annotations

import msgspec

from gpusim.formats.trace import Storage, Trace
from gpusim.memplan.policies.registry import MEMORY_POLICIES
from gpusim.memplan.storages import Storages
from gpusim.plan.graph import OpGraph
from tests.support.helpers import Step, kernel, make_hardware, make_trace

#: Policies that plan steps without variants, too.
WITHOUT_VARIANTS = [name for name in MEMORY_POLICIES if name not in ("vdnn_all_m", "vdnn_conv_m")]
#: Size of every tensor of the chain, in bytes: 4 MiB, so that none is rounded.
SIZE = 4 << 20


def chain_step(
    layers: int = 4, dur_ns: int = 100_000, gradient_ns: int | None = None, target: str = "aten.relu.default"
) -> Trace:
    """x -> a0 -> a1 ... -> loss, and back: the backward op of layer i reads a[i-1] and makes g[i-1].

    Each a[i] has 4 MiB and is needed by layer i+1 and by its backward op.
    """
    steps: list[Step] = []
    for i in range(layers):
        before = f"a{i - 1}" if i else "x"
        steps.append(Step(f"f{i}", before, f"a{i}", kernels=(kernel(dur_ns),), target=target))
    steps.append(Step("loss", f"a{layers - 1}", f"g{layers - 1}", kernels=(kernel(1000),), phase="forward"))
    for i in reversed(range(layers)):
        before = f"a{i - 1}" if i else "x"
        gradient = f"g{i - 1}" if i else "w"
        steps.append(
            Step(
                f"b{i}",
                f"g{i} {before}",
                gradient,
                kernels=(kernel(gradient_ns or 2 * dur_ns),),
                phase="backward",
                target=target.replace(".default", "_backward.default"),
            )
        )
    trace = make_trace(steps, outputs="w", elements=SIZE // 4)
    model = msgspec.structs.replace(trace.model, mode="train")
    return msgspec.structs.replace(trace, model=model)


def with_bytes(trace: Trace, sizes: dict[str, int]) -> Trace:
    """Return the trace with other storage sizes for some tensors, by name."""
    storages = list(trace.storages)
    for tensor in trace.tensors:
        if tensor.name in sizes:
            storages[tensor.storage] = Storage(bytes=sizes[tensor.name])
    return msgspec.structs.replace(trace, storages=tuple(storages))


def storage_of(trace: Trace, name: str) -> int:
    """Return the storage of a tensor by its name."""
    return next(t.storage for t in trace.tensors if t.name == name)


def op_of(trace: Trace, name: str) -> int:
    """Return an op by its name."""
    return next(index for index, op in enumerate(trace.ops) if op.name == name)


def graph_of(trace: Trace, **hardware: float) -> OpGraph:
    """Return the step on round hardware: copies of 50 bytes per ns."""
    return OpGraph.build(trace, make_hardware(**hardware))


def storages_of(trace: Trace) -> Storages:
    return Storages.of(trace)
