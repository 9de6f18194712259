"""Timelines for other tools: Kineto-like JSON with operators and launches, execution traces, Chakra `.et`.

`gpusim import` reads all three. Kineto's times are microseconds with three decimals, which preserves nanoseconds.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from itertools import groupby
from math import prod
from typing import Any, Final

import msgspec

from gpusim.engine.base import Timeline
from gpusim.formats.arguments import tensor_refs
from gpusim.formats.hardware import HardwareModel
from gpusim.formats.trace import Op, Trace
from gpusim.importers.chakra import DURATION_NS, STREAM, TRUE_DATA
from gpusim.importers.kineto import ALONE, GROUND_TRUTH
from gpusim.importers.model import ESTIMATED, SIMULATED, SLOWED
from gpusim.report.perfetto import PRODUCER, ns_to_trace_us, run_from_timeline
from gpusim.trace.dependencies import dependencies, handles
from gpusim.trace.element_sizes import DTYPE_BYTES
from gpusim.trace.kernel_doubts import slowed_frac
from gpusim.units import NS_PER_US

#: Host time of a launch and of the operator around it; the host runs ahead of the GPU by all of them.
LAUNCH_NS, OPERATOR_NS = 2_000, 4_000
HOST, HOST_THREAD = 1_000_000, 1_000_001
ET_SCHEMA: Final = "1.1.1-chakra.0.0.4"
COMP_NODE: Final = 4
#: torch's names of types -> names in a profile.
_CPP_TYPES: Final = {
    "float32": "float", "float64": "double", "float16": "c10::Half", "bfloat16": "c10::BFloat16", "bool": "bool",
    "int64": "long int", "int32": "int", "int16": "short int", "int8": "signed char", "uint8": "unsigned char",
}  # fmt: skip
_CALLS: Final = {"kernel": "cudaLaunchKernel", "gpu_memcpy": "cudaMemcpyAsync"}
#: Storage that stands for the random generator shared by random ops.
_GENERATOR: Final = 2**40


def kineto_document(
    timeline: Timeline, trace: Trace, title: str, hardware: HardwareModel, *, anew: bool = False
) -> dict[str, Any]:
    """Return the timeline in the format of torch.profiler: operators, launches and kernels, tied by `correlation`.

    Operators are launched in the schedule's order. `anew` is True if other kernels run than in the measured step.
    """
    run = run_from_timeline(timeline, trace, title, hardware)
    tasks = timeline.plan.tasks
    base_ns = OPERATOR_NS * (len(tasks) + 2)
    events: list[dict[str, Any]] = []

    def add(
        category: str, name: str, thread: tuple[int, int], start_ns: int, dur_ns: int, args: dict[str, Any]
    ) -> None:
        times = {"ts": ns_to_trace_us(start_ns), "dur": ns_to_trace_us(dur_ns)}
        events.append(
            {"ph": "X", "cat": category, "name": name, "pid": thread[0], "tid": thread[1], **times, "args": args}
        )

    def arrow(number: int, call_ns: int, thread: tuple[int, int], start_ns: int) -> None:
        """Add a flow from a launch to its kernel: TraceLens requires it, and Perfetto draws it."""
        flow = {"id": number, "cat": "ac2g", "name": "ac2g"}
        events.append({"ph": "s", **flow, "pid": HOST, "tid": HOST_THREAD, "ts": ns_to_trace_us(call_ns)})
        events.append(
            {"ph": "f", **flow, "pid": thread[0], "tid": thread[1], "ts": ns_to_trace_us(start_ns), "bp": "e"}
        )

    end_ns = max((piece.end_ns for piece in run.slices), default=0)
    add("user_annotation", "ProfilerStep#1", (HOST, HOST_THREAD), 0, base_ns + end_ns, {})
    for op, numbers in groupby(range(len(tasks)), key=lambda number: tasks[number].op):
        launched = list(numbers)
        begin_ns = OPERATOR_NS * (launched[0] + 1)
        if op >= 0:
            name = trace.ops[op].target.replace("aten.", "aten::", 1).partition(".")[0]
            args = {"External id": op, "Record function id": op + 1, **_recorded_shapes(trace, trace.ops[op])}
            add("cpu_op", name, (HOST, HOST_THREAD), begin_ns, OPERATOR_NS * len(launched) - 1, args)
        for place, index in enumerate(launched):
            piece = run.slices[index]
            call = _CALLS.get(piece.category, "cudaMemsetAsync")
            call_ns = begin_ns + OPERATOR_NS * place + 500
            args = {"External id": op, "correlation": index + 1}
            add("cuda_runtime", call, (HOST, HOST_THREAD), call_ns, LAUNCH_NS, args)
            args = {**piece.args, ALONE: ns_to_trace_us(round(tasks[index].dur_ns))}
            lane, start_ns = (piece.device, piece.stream), base_ns + piece.start_ns
            add(piece.category, piece.name, lane, start_ns, piece.dur_ns, args)
            arrow(index + 1, call_ns, lane, start_ns)
    # Concurrent kernels take longer than alone, and the time measured at capture determines the gaps.
    measured = trace.ground_truth is not None and trace.provenance.gpu.name == hardware.gpu and not anew
    return {
        "schemaVersion": 1,
        "deviceProperties": [{"id": 0, "name": hardware.gpu, "numSms": hardware.limits.sms}],
        "distributedInfo": {"rank": 0, "world_size": 1},
        "displayTimeUnit": "ms",
        "otherData": {
            "producer": PRODUCER,
            **_origin(trace),
            **({GROUND_TRUTH: trace.ground_truth} if measured else {}),
        },
        "traceEvents": events,
    }


def _origin(trace: Trace) -> dict[str, bool | str]:
    """Return where the times come from: a simulation, of kernels that are estimated or slowed, if so."""
    estimated, slowed = trace.provenance.estimated, slowed_frac(trace)
    origin: dict[str, bool | str] = {SIMULATED: True}
    if estimated:
        origin[ESTIMATED] = estimated
    if slowed:
        origin[SLOWED] = f"{slowed:.6f}"
    return origin


def _recorded_shapes(trace: Trace, op: Op) -> dict[str, list[Any]]:
    """Return arguments as in a profile with `record_shapes`; empty for an imported op, which has none."""
    dims: list[Any] = []
    strides: list[Any] = []
    types: list[str] = []
    values: list[str] = []
    for argument in op.args:
        several = isinstance(argument, list | tuple)
        tensors = [trace.tensors[index] for index in tensor_refs(argument)]
        shapes, steps = [list(tensor.shape) for tensor in tensors], [list(tensor.stride) for tensor in tensors]
        dims.append(shapes if several else next(iter(shapes), []))
        strides.append(steps if several else next(iter(steps), []))
        if tensors:
            types.append("TensorList" if several else _CPP_TYPES.get(tensors[0].dtype, tensors[0].dtype))
        else:
            types.append(
                "" if argument is None or isinstance(argument, dict) else "ScalarList" if several else "Scalar"
            )
        values.append("" if not types[-1] or tensors else str(list(argument) if several else argument))
    if not op.args:
        return {}
    return {"Input Dims": dims, "Input Strides": strides, "Input type": types, "Concrete Inputs": values}


def kineto_text(document: dict[str, Any]) -> bytes:
    """Return the document as JSON with a space after each colon, as required by HTA's pattern for the rank."""
    return msgspec.json.format(msgspec.json.encode(document), indent=0) + b"\n"


def execution_trace_document(trace: Trace) -> dict[str, Any]:
    """Return the ops and their tensors as an execution trace of PyTorch, with `rf_id` as in `kineto_document`."""
    known: set[int] = set()
    nodes = []
    for index, op in enumerate(trace.ops):
        written = {tensor for tensor in (*op.writes, *op.outputs) if tensor is not None}
        again = {tensor for tensor in written if trace.tensors[tensor].storage in known}
        inputs = sorted({*op.reads, *(tensor for tensor in handles(op) if tensor not in op.writes), *again})
        outputs = sorted(tensor for tensor in written if tensor in op.writes)
        known |= {trace.tensors[tensor].storage for tensor in (*inputs, *outputs)}
        generator = [[_GENERATOR, _GENERATOR, 0, 1, 8, "cuda:0"]] if op.random else []
        sides = [[_tensor(trace, tensor) for tensor in side] + generator for side in (inputs, outputs)]
        name = op.target.replace("aten.", "aten::", 1).partition(".")[0]
        empty: dict[str, Any] = {"shapes": [], "types": [], "strides": []}
        attributes = {"rf_id": ("uint64", index + 1), "op_schema": ("string", "")}
        nodes.append(
            {
                "id": index + 2,
                "name": name,
                "ctrl_deps": 1,
                "inputs": {"values": sides[0], **empty},
                "outputs": {"values": sides[1], **empty},
                "attrs": [{"name": key, "type": kind, "value": value} for key, (kind, value) in attributes.items()],
            }
        )
    return {"schema": ET_SCHEMA, "pid": 1, "time": "", "start_ts": 0, "nodes": nodes, "finish_ts": 0}


def _tensor(trace: Trace, number: int) -> list[Any]:
    tensor = trace.tensors[number]
    return [number + 1, tensor.storage + 1, tensor.offset, prod(tensor.shape), DTYPE_BYTES[tensor.dtype], "cuda:0"]


def chakra_bytes(timeline: Timeline, trace: Trace) -> bytes:
    """Return the kernels as a Chakra `.et` with true data dependencies, in whole us plus `duration_nanos`."""
    tasks = timeline.plan.tasks
    last_of_op: dict[int, int] = {}
    before: list[set[int]] = [set() for _ in tasks]
    preds = _work_preds(trace, {task.op for task in tasks})
    order = sorted(range(len(tasks)), key=lambda index: (tasks[index].op, index))
    for index in order:
        op = tasks[index].op
        if op in last_of_op:
            before[index].add(last_of_op[op])
        elif op >= 0:
            before[index] |= {last_of_op[p] for p in preds[op] if p in last_of_op}
        last_of_op[op] = index
    pieces = [
        _message(
            _field(1, 2, b"0.0.4")
            + _field(2, 2, _attribute("schema", 29, ET_SCHEMA))
            + _field(2, 2, _attribute(TRUE_DATA, 27, True))
            + b"".join(
                _field(2, 2, _attribute(key, 27 if value is True else 29, value))
                for key, value in _origin(trace).items()
            )
        )
    ]
    for index in sorted(range(len(tasks)), key=lambda number: timeline.start_ns[number]):
        start_ns, dur_ns = timeline.start_ns[index], timeline.end_ns[index] - timeline.start_ns[index]
        node = _field(1, 0, index + 1) + _field(2, 2, tasks[index].name.encode()) + _field(3, 0, COMP_NODE)
        node += b"".join(_field(5, 0, number + 1) for number in sorted(before[index]))
        node += _field(6, 0, round(start_ns / NS_PER_US)) + _field(7, 0, round(dur_ns / NS_PER_US))
        for key, kind, value in (("is_cpu_op", 27, False), (DURATION_NS, 9, dur_ns), (STREAM, 9, tasks[index].queue)):
            node += _field(10, 2, _attribute(key, kind, value))
        pieces.append(_message(node))
    return b"".join(pieces)


def _work_preds(trace: Trace, with_work: Iterable[int]) -> list[set[int]]:
    """Return the ops with GPU work that each op waits for, directly or through ops without work."""
    work = set(with_work)
    work_preds: list[set[int]] = []
    for preds in dependencies(trace):
        needed: set[int] = set()
        for pred in preds:
            needed |= {pred} if pred in work else work_preds[pred]
        work_preds.append(needed)
    return work_preds


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 127:
        encoded.append(value & 127 | 128)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def _field(number: int, wire: int, value: int | bytes) -> bytes:
    key = _varint(number << 3 | wire)
    return key + (_varint(value) if isinstance(value, int) else _varint(len(value)) + value)


def _attribute(name: str, number: int, value: bool | int | float | str) -> bytes:
    encoded = _field(1, 2, name.encode())
    if isinstance(value, str):
        return encoded + _field(number, 2, value.encode())
    if isinstance(value, float):
        return encoded + _varint(number << 3 | 1) + struct.pack("<d", value)
    return encoded + _field(number, 0, int(value))


def _message(data: bytes) -> bytes:
    return _varint(len(data)) + data
