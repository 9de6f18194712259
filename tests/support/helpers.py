"""Shared builders: hand-made traces, round hardware, random traces, schedules and plans."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from hypothesis import strategies as st

from gpusim.formats.hardware import HardwareModel, load_hardware
from gpusim.formats.schedule import Partition
from gpusim.formats.trace import (
    SCHEMA,
    Gpu,
    GroundTruth,
    Kernel,
    Model,
    Op,
    Phase,
    Provenance,
    Role,
    Storage,
    Tensor,
    TensorInit,
    Timing,
    Trace,
)
from gpusim.plan.graph import OpGraph
from gpusim.plan.lower import lower
from gpusim.plan.schedule import Schedule
from gpusim.plan.tasks import Buffer, LaunchMode, Plan, Task
from gpusim.rules.occupancy import Demand
from gpusim.trace.dependencies import dependencies

GPU = "NVIDIA H200"
SMS = 132

#: Grids for kernels of 1024 threads, of which an SM holds two: one block, half the GPU, the whole GPU, many waves.
ONE_SM, HALF, WHOLE, WAVES = 1, 132, 264, 2640


@dataclass(frozen=True)
class Step:
    """One op of a hand-made trace, with tensors by name; a name without maker is an input of the step."""

    name: str
    reads: str = ""
    """Names of tensors to read, separated by blanks."""
    makes: str = ""
    """New tensors, each with its own storage."""
    changes: str = ""
    """Tensors changed in place."""
    views: str = ""
    """New tensors that share the storage of the first tensor in `looks_at`."""
    looks_at: str = ""
    """Tensors in the arguments whose elements are not read."""
    kernels: tuple[Kernel, ...] = ()
    random: bool = False
    host_ns: int = 0
    phase: Phase = "forward"
    target: str = "aten.test.default"
    args: tuple[Any, ...] = ()
    """Arguments after the tensors."""


def kernel(dur_ns: int, blocks: int = ONE_SM, threads: int = 1024, regs: int = 0, smem: int = 0) -> Kernel:
    """Make a kernel of `blocks` blocks; with 1024 threads, `HALF` of them take half of the GPU's threads."""
    return Kernel(
        name=f"k{dur_ns}",
        dur_ns=dur_ns,
        grid=(blocks, 1, 1),
        block=(threads, 1, 1),
        regs_per_thread=regs,
        smem_bytes=smem,
    )


def memset(dur_ns: int) -> Kernel:
    """Make a memset, which needs no SM."""
    return Kernel(name="Memset (Device)", kind="memset", dur_ns=dur_ns, bytes=1024)


def op(name: str, reads: str = "", makes: str | None = None, dur_ns: int = 1000, blocks: int = ONE_SM) -> Step:
    """Make an op of one kernel that makes the tensor of its own name."""
    return Step(name, reads, name if makes is None else makes, kernels=(kernel(dur_ns, blocks),))


def view(name: str, base: str) -> Step:
    """Make an op without kernels: a view of `base`, named like the op."""
    return Step(name, views=name, looks_at=base)


def in_place(name: str, target: str, reads: str = "", dur_ns: int = 1000) -> Step:
    """Make an op that changes `target`."""
    return Step(name, reads=f"{target} {reads}", changes=target, kernels=(kernel(dur_ns),))


def make_trace(
    steps: Iterable[Step],
    *,
    outputs: str = "",
    eager_ns: int | None = None,
    graph_ns: int | None = None,
    gpu: str = GPU,
    elements: int = 256,
) -> Trace:
    """Make a trace of `steps`; tensors are float32 vectors of `elements` elements, `outputs` the step's results."""
    tensors: list[Tensor] = []
    storages: list[Storage] = []
    index_of: dict[str, int] = {}
    results = set(outputs.split())

    def add(name: str, storage: int | None = None, init: TensorInit | None = None) -> int:
        if storage is None:
            storages.append(Storage(bytes=4 * elements))
            storage = len(storages) - 1
        role: Role = "input" if init else "output" if name in results else "activation"
        tensors.append(
            Tensor(shape=(elements,), stride=(1,), dtype="float32", storage=storage, role=role, name=name, init=init)
        )
        index_of[name] = len(tensors) - 1
        return index_of[name]

    def get(name: str) -> int:
        return index_of[name] if name in index_of else add(name, init=TensorInit(kind="normal", b=1.0))

    ops: list[Op] = []
    for step in steps:
        reads = [get(name) for name in step.reads.split()]
        changes = [get(name) for name in step.changes.split()]
        looks_at = [get(name) for name in step.looks_at.split()]
        new = [add(name) for name in step.makes.split()]
        views = [add(name, storage=tensors[looks_at[0]].storage) for name in step.views.split()]
        mentioned = dict.fromkeys([*reads, *changes, *looks_at])
        ops.append(
            Op(
                name=step.name,
                target=step.target,
                args=(*({"tensor": tensor} for tensor in mentioned), *step.args),
                outputs=(*new, *views, *changes),
                reads=tuple(dict.fromkeys(reads)),
                writes=(*changes, *new),
                random=step.random,
                phase=step.phase,
                host_ns=step.host_ns,
                kernels=step.kernels,
            )
        )
    truth = None
    if graph_ns is not None:
        truth = GroundTruth(eager=_timing(eager_ns or graph_ns), graph=_timing(graph_ns), attributed_frac=1.0)
    return Trace(
        schema=SCHEMA,
        provenance=Provenance(
            gpu=Gpu(name=gpu, driver="1", cuda="1", torch="1", cudnn="1", sm_clock_mhz=1980, mem_clock_mhz=3201),
            date="2025-01-01",
            command="made by hand",
            gpusim="0",
        ),
        model=Model(
            spec="tests:make_trace",
            network="tiny",
            mode="infer",
            batch=1,
            dtype="tf32",
            memory_format="contiguous",
            frontend="aten",
        ),
        storages=tuple(storages),
        tensors=tuple(tensors),
        ops=tuple(ops),
        ground_truth=truth,
    )


def with_kernels(trace: Trace) -> Trace:
    """Add a synthetic kernel to every op that writes: a file must have kernels."""
    ops = (msgspec.structs.replace(op, kernels=(kernel(1000),)) if op.writes else op for op in trace.ops)
    return msgspec.structs.replace(trace, ops=tuple(ops))


def _timing(median_ns: int) -> Timing:
    return Timing(median_ns=median_ns, lo_ns=median_ns, hi_ns=median_ns, rounds=1)


def chain_trace(length: int = 5, dur_ns: int = 1000, **options: Any) -> Trace:
    """Make a chain of ops."""
    steps = [op("a0", "x", dur_ns=dur_ns)]
    steps += [op(f"a{i}", f"a{i - 1}", dur_ns=dur_ns) for i in range(1, length)]
    return make_trace(steps, **options)


def wide_trace(width: int = 6, dur_ns: int = 10_000, depth: int = 2, blocks: int = ONE_SM, **options: Any) -> Trace:
    """Make a stem, `width` independent chains of small kernels, and a join of all."""
    steps = [op("stem", "x", dur_ns=1000)]
    for branch in range(width):
        for place in range(depth):
            before = f"b{branch}_{place - 1}" if place else "stem"
            steps.append(op(f"b{branch}_{place}", before, dur_ns=dur_ns, blocks=blocks))
    steps.append(op("join", " ".join(f"b{branch}_{depth - 1}" for branch in range(width)), dur_ns=1000))
    return make_trace(steps, outputs="join", **options)


def make_hardware(
    *,
    chain_ns: float = 0.0,
    fork_ns: float = 0.0,
    join_ns: float = 0.0,
    busy_ns: float = 0.0,
    busy_starts: float = 0.0,
    product_frac: float = 0.0,
    branch_ns: float = 0.0,
    front_end_ns: float = 0.0,
    turnover_ns: float = 0.0,
    memory_node_ns: float = 0.0,
    slowdown: float = 0.0,
    sharing: float = 0.0,
    matrix: float = 0.0,
    cross: float = 1.0,
    dram_bytes_per_ns: float = 1000.0,
    launch_ns: float = 0.0,
    start_ns: float = 0.0,
    stream_chain_ns: float = 0.0,
    event_ns: float = 0.0,
    event_host_ns: float = 0.0,
    queues: int = 8,
    h2d: float = 50.0,
    d2h: float = 50.0,
    both: float = 100.0,
    copy_latency_ns: float = 0.0,
    switch_ns: float = 0.0,
    kernel_slowdown: float = 0.0,
    copy_slowdown: float = 0.0,
    memset_d2h_ns: float = 0.0,
    memset_h2d_ns: float = 0.0,
    uncertainty: float = 0.0,
    searched_frac: float = 0.0,
    **top_level: Any,
) -> HardwareModel:
    """Return the bundled H200 with round numbers for all measured constants; its limits stay.

    Its SMs are pooled, unless `sharing` gives an exponent; `matrix` is that of matrix kernels.
    """
    model = load_hardware("h200")
    replace = msgspec.structs.replace
    return replace(
        model,
        memory=replace(model.memory, dram_bytes_per_ns=dram_bytes_per_ns),
        copies=replace(
            model.copies,
            h2d_bytes_per_ns=h2d,
            d2h_bytes_per_ns=d2h,
            both_bytes_per_ns=both,
            latency_ns=copy_latency_ns,
            switch_ns=switch_ns,
            kernel_slowdown=kernel_slowdown,
            copy_slowdown=copy_slowdown,
            memset_d2h_ns=memset_d2h_ns,
            memset_h2d_ns=memset_h2d_ns,
        ),
        graph=replace(
            model.graph,
            chain_ns=chain_ns,
            fork_ns=fork_ns,
            join_ns=join_ns,
            busy_ns=busy_ns,
            busy_starts=busy_starts,
            product_frac=product_frac,
            branch_ns=branch_ns,
            front_end_ns=front_end_ns,
            turnover_ns=turnover_ns,
            memory_node_ns=memory_node_ns,
        ),
        stream=replace(
            model.stream,
            launch_ns=launch_ns,
            start_ns=start_ns,
            chain_ns=stream_chain_ns,
            event_ns=event_ns,
            event_host_ns=event_host_ns,
            queues=queues,
        ),
        contention=replace(
            model.contention,
            younger_slowdown=slowdown,
            sharing_exponent=sharing,
            matrix_exponent=matrix,
            cross_load=cross,
        ),
        uncertainty=replace(
            model.uncertainty,
            sequential_frac=uncertainty,
            schedule_frac=uncertainty,
            searched_frac=searched_frac,
            less_known_frac=0.0,
            saving_frac=0.0,
        ),
        **top_level,
    )


def share(part: float, cover: float = 1.0) -> Demand:
    """Return a demand for `part` of the GPU's threads and block slots, and nothing else."""
    return Demand(threads=part, regs=0.0, smem=0.0, slots=part, residency=part, cover=cover)


def task(dur_ns: float, part: float = 0.25, queue: int = 0, deps: Sequence[int] = (), **fields: Any) -> Task:
    """Make a kernel that takes `part` of the GPU."""
    fields.setdefault("demand", share(part))
    return Task(name=f"t{dur_ns:g}", dur_ns=dur_ns, queue=queue, deps=tuple(deps), **fields)


def copy(kind: str, size: int, queue: int = 0, deps: Sequence[int] = ()) -> Task:
    """Make a copy of `size` bytes, `h2d` or `d2h`."""
    return Task(name=kind, kind=kind, copy_bytes=size, queue=queue, deps=tuple(deps))  # type: ignore[arg-type]


def plan(*tasks: Task, mode: LaunchMode = "graph", **fields: Any) -> Plan:
    """Make a plan of these tasks in launch order."""
    return Plan(tasks=tasks, mode=mode, **fields)


# --- Independent answers to hold the library's against ---


def ancestors(preds: Sequence[Iterable[int]]) -> list[set[int]]:
    """Return all ancestors of each node; every predecessor has a smaller index."""
    result: list[set[int]] = []
    for before in preds:
        before_node: set[int] = set()
        for node in before:
            before_node |= {node} | result[node]
        result.append(before_node)
    return result


def touched_storages(trace: Trace, op: Op) -> tuple[set[int], set[int]]:
    """Return the storages whose elements an op reads, and those it writes."""
    return {trace.tensors[t].storage for t in op.reads}, {trace.tensors[t].storage for t in op.writes}


def works(op: Op) -> bool:
    """Whether an op counts as running on the GPU."""
    return bool(op.kernels or op.writes)


# --- Random inputs ---


@st.composite
def kernels(draw: st.DrawFn) -> Kernel:
    """Draw a kernel that an H200 can run, sometimes a memset."""
    if draw(st.integers(0, 9)) == 0:
        return memset(draw(st.integers(1, 3000)))
    threads = draw(st.sampled_from((32, 100, 128, 256, 512, 1024)))
    regs = min(draw(st.sampled_from((0, 16, 32, 64, 128, 255))), 65536 // threads // 8 * 8)
    return Kernel(
        name=draw(st.sampled_from(("gemm", "conv", "add", "softmax"))),
        dur_ns=draw(st.integers(1, 20_000)),
        grid=(draw(st.sampled_from((1, 7, 66, 132, 200, 264, 1000, 5000))), draw(st.integers(1, 3)), 1),
        block=(threads, 1, 1),
        regs_per_thread=min(regs, 255),
        smem_bytes=draw(st.sampled_from((0, 0, 1024, 49152, 100_000, 232_448))),
    )


@st.composite
def traces(draw: st.DrawFn, max_ops: int = 14) -> Trace:
    """Draw a legal trace: kernels, views, views of views, ops in place, memsets, random ops, ops of several kernels.

    At least one op has a kernel. Some tensors are outputs of the step.
    """
    names = ["x0", "x1"]
    bases = 2
    steps: list[Step] = []
    count = draw(st.integers(1, max_ops))
    some = st.lists(kernels(), min_size=1, max_size=3).map(tuple)
    for index in range(count):
        kind = "make" if index == 0 else draw(st.sampled_from(("make", "make", "make", "view", "change", "silent")))
        near = st.sampled_from(names[-6:] + names[:bases])
        name = f"t{index}"
        reads = " ".join(draw(st.lists(near, max_size=3, unique=True)))
        random = draw(st.integers(0, 7)) == 0
        host_ns = draw(st.integers(0, 5000))
        if kind == "view":
            steps.append(Step(f"op{index}", views=name, looks_at=draw(near), host_ns=host_ns))
        elif kind == "make":
            steps.append(Step(f"op{index}", reads, name, kernels=draw(some), random=random, host_ns=host_ns))
        else:
            target = draw(near)
            launched = draw(some) if kind == "change" else ()  # silent: it writes, but has no kernel
            steps.append(Step(f"op{index}", f"{target} {reads}", changes=target, kernels=launched, random=random))
        if kind in ("make", "view"):
            names.append(name)
    results = draw(st.lists(st.sampled_from(names), max_size=2))
    graph_ns = draw(st.none() | st.integers(1000, 100_000))
    return make_trace(steps, outputs=" ".join(results), graph_ns=graph_ns)


@st.composite
def schedules(draw: st.DrawFn, trace: Trace, max_streams: int = 4) -> tuple[list[int], list[int]]:
    """Draw a legal launch order of a trace's ops, and the stream of each op."""
    preds = dependencies(trace)
    count = len(preds)
    priority = draw(st.lists(st.integers(0, 20), min_size=count, max_size=count))
    order: list[int] = []
    left = set(range(count))
    while left:
        ready = [node for node in left if not left.intersection(preds[node])]
        chosen = min(ready, key=lambda node: (priority[node], node))
        order.append(chosen)
        left.discard(chosen)
    streams = draw(st.lists(st.integers(0, max_streams - 1), min_size=count, max_size=count))
    return order, streams


@st.composite
def traces_with_schedules(draw: st.DrawFn, max_ops: int = 14) -> tuple[Trace, list[int], list[int]]:
    """Draw a random trace, a legal order of its ops, and the stream of each."""
    trace = draw(traces(max_ops))
    order, streams = draw(schedules(trace))
    return trace, order, streams


@st.composite
def plans(draw: st.DrawFn, mode: LaunchMode = "graph", max_tasks: int = 16, max_queues: int = 5) -> Plan:
    """Draw a plan: kernels large and small, memsets, copies, queues, dependencies on earlier tasks, buffers."""
    tasks: list[Task] = []
    part = st.sampled_from((0.0, 0.01, 0.1, 0.25, 0.3, 0.5, 0.75, 1.0))
    time = st.sampled_from((0.0, 0.3, 1.0, 7.7, 100.0, 1234.5)) | st.floats(0.0, 20_000.0).map(lambda t: round(t, 3))
    for index in range(draw(st.integers(1, max_tasks))):
        deps = draw(st.sets(st.integers(0, index - 1), max_size=3)) if index else set()
        queue = draw(st.integers(0, max_queues - 1))
        kind = draw(st.sampled_from(("kernel", "kernel", "kernel", "kernel", "memset", "h2d", "d2h")))
        common: dict[str, Any] = {"name": f"t{index}", "queue": queue, "deps": tuple(sorted(deps)), "op": index}
        if kind in ("h2d", "d2h"):
            tasks.append(
                Task(kind="h2d" if kind == "h2d" else "d2h", copy_bytes=draw(st.integers(0, 100_000)), **common)
            )
        elif kind == "memset":
            common["on_copy_engine"] = draw(st.booleans())
            tasks.append(Task(kind="memset", dur_ns=draw(time), extra_ns=draw(st.sampled_from((0.0, 50.0))), **common))
        else:
            demand = Demand(*(draw(part) for _ in range(6)))
            if not any((demand.threads, demand.slots)):
                demand = share(0.01)
            dram_bytes = draw(st.sampled_from((0.0, 1e3, 1e6)))
            tasks.append(Task(dur_ns=draw(time), demand=demand, dram_bytes=dram_bytes, **common))
    buffers = draw(
        st.lists(
            st.builds(
                Buffer,
                bytes=st.integers(0, 1000),
                tasks=st.lists(st.integers(0, len(tasks) - 1), min_size=1, max_size=3).map(tuple),
            ),
            max_size=4,
        )
    )
    kept_bytes = draw(st.integers(0, 1000))
    return Plan(tasks=tuple(tasks), mode=mode, buffers=tuple(buffers), kept_bytes=kept_bytes)


@st.composite
def hardware_models(draw: st.DrawFn) -> HardwareModel:
    """Draw costs and contention over their usual range; zero is common."""
    return make_hardware(
        chain_ns=draw(st.sampled_from((0.0, 100.0, 405.3))),
        fork_ns=draw(st.sampled_from((0.0, 30.0))),
        join_ns=draw(st.sampled_from((0.0, 40.0))),
        busy_ns=draw(st.sampled_from((0.0, 60.0))),
        busy_starts=draw(st.sampled_from((0.0, 1.7))),
        product_frac=draw(st.sampled_from((0.0, 0.2))),
        branch_ns=draw(st.sampled_from((0.0, 45.0))),
        front_end_ns=draw(st.sampled_from((0.0, 250.0, 333.3))),
        turnover_ns=draw(st.sampled_from((0.0, 0.9))),
        memory_node_ns=draw(st.sampled_from((0.0, 700.0))),
        slowdown=draw(st.sampled_from((0.0, 0.8))),
        matrix=draw(st.sampled_from((0.0, 0.2, 0.9))),
        cross=draw(st.sampled_from((1.0, 0.6))),
        launch_ns=draw(st.sampled_from((0.0, 5000.0))),
        start_ns=draw(st.sampled_from((0.0, 2000.0))),
        stream_chain_ns=draw(st.sampled_from((0.0, 405.3))),
        event_ns=draw(st.sampled_from((0.0, 3000.0))),
        event_host_ns=draw(st.sampled_from((0.0, 2000.0))),
        queues=draw(st.sampled_from((1, 2, 8, 32))),
        copy_latency_ns=draw(st.sampled_from((0.0, 2000.0))),
        both=draw(st.sampled_from((60.0, 100.0))),
        switch_ns=draw(st.sampled_from((0.0, 0.0, 700.0))),
        kernel_slowdown=draw(st.sampled_from((0.0, 0.0, 0.13))),
        copy_slowdown=draw(st.sampled_from((0.0, 0.0, 0.17))),
        memset_d2h_ns=draw(st.sampled_from((0.0, 90.0))),
        memset_h2d_ns=draw(st.sampled_from((0.0, 300.3))),
    )


def build_graph(trace: Trace, hardware: HardwareModel | None = None) -> OpGraph:
    """Return the op graph of a trace on round numbers."""
    return OpGraph.build(trace, hardware or make_hardware())


def lowered(
    graph: OpGraph,
    order: Sequence[int],
    streams: Sequence[int],
    mode: LaunchMode = "graph",
    *,
    variants: Sequence[int] = (),
    partitions: Sequence[Partition] = (),
    memory: bool = True,
) -> Plan:
    """Return the plan of a launch order and the streams by op, for cases written by hand."""
    schedule = schedule_of(order, streams, variants=variants, partitions=partitions)
    return lower(graph, schedule, mode, memory=memory)


def schedule_of(order: Sequence[int], streams: Sequence[int], **fields: Any) -> Schedule:
    """Make a schedule from any sequences; `fields` are its others."""
    lists = {name: tuple(fields.pop(name, ())) for name in ("variants", "partitions")}
    return Schedule(tuple(order), tuple(streams), **lists, **fields)
