"""A plan for several GPUs as tasks of the engines.

Each kind of GPU (`gpusim.layerwise.roles`) is a device with a stream of kernels. Transfers between layers run in a
second stream; while the gradient of a product's input is on its way, that of its weights is computed. Gradients are
summed in buckets during the backward pass in a third stream, as in DistributedDataParallel: small ones are copied into
a bucket. A collective is two tasks on each participating GPU, which start once all of them are ready:

- on the GPU, a kernel that occupies some SMs and moves device memory;
- on the GPU's link, a separate device: tasks without blocks share its bandwidth by the engines' rule for DRAM, so each
  of two concurrent collectives takes twice as long.

So no engine needs a rule for links, and both give the same times.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal

import msgspec

from gpusim.formats.hardware import HardwareModel
from gpusim.layerwise.buckets import Bucket, gradient_buckets, sums_by_reading
from gpusim.layerwise.communication import members, sync_ns, time_ns, wire_share
from gpusim.layerwise.compute import TraceTimes
from gpusim.layerwise.configs import Config
from gpusim.layerwise.costs import (
    Problem,
    exchange_ns,
    gather_of,
    passes_moved,
    shared_gradient,
    statistics_members,
    tied_ns,
    weight_members,
)
from gpusim.layerwise.fixed_plans import Choice
from gpusim.layerwise.layers import BATCH, Edge, Layer
from gpusim.layerwise.made_up import (
    collective_kernel,
    copy_kernel,
    is_matrix,
    made_up_kernel,
    streaming_kernel,
    sum_kernel,
)
from gpusim.layerwise.packing import Packing, packing
from gpusim.layerwise.pieces import pieces
from gpusim.layerwise.regions import transfers
from gpusim.layerwise.roles import Role, roles_of
from gpusim.layerwise.shares import Share, backward_work, forward_work, shares_of, weight_elements
from gpusim.plan.tasks import Plan, Task

#: Streams of a GPU.
COMPUTE, TRANSFER, SYNC = 0, 1, 2
#: Purpose of a task.
Purpose = Literal["forward", "backward", "copy", "optimizer", "transfer", "sync", "statistics"]


@dataclass(frozen=True, slots=True)
class Lowered:
    """The tasks of a plan, each with its purpose."""

    plan: Plan
    hardware: HardwareModel
    purposes: tuple[Purpose, ...]
    layers: tuple[int, ...]
    """Index of each task's layer, -1 for none."""
    solo_ns: tuple[float, ...]
    """Time of each task alone."""
    roles: tuple[Role, ...]
    all_roles: bool
    """Whether every kind of GPU is simulated."""


def lower_plan(problem: Problem, choice: Choice) -> Lowered:
    """Return the tasks of one training or inference step of a plan."""
    roles, all_roles = roles_of(problem, choice)
    return Lowering(problem, choice, roles).run(all_roles)


class Lowering:
    """Builder of a plan's tasks; subclasses change transfers, sums and optimizer by `before` and `backward`."""

    def __init__(self, problem: Problem, choice: Choice, roles: tuple[Role, ...]) -> None:
        self.problem, self.choice, self.roles = problem, choice, roles
        self.graph, self.topology = problem.graph, problem.topology
        self.hardware = problem.hardware
        self.tasks: list[Task] = []
        self.purposes: list[Purpose] = []
        self.layer_of: list[int] = []
        self.last_kernel: list[int] = [-1] * len(roles)
        self.waiting: list[list[int]] = [[] for _ in roles]
        """Collectives that the next kernel of each role waits for."""
        self.users = self.graph.consumers()
        self.gpus = tuple(role.gpu for role in roles)
        self.shares = [shares_of(layer, config, self.gpus) for layer, config in self._pairs()]
        self.exchanges: dict[tuple[int, int], _Exchange] = {}
        self.begun: dict[int, dict[int, list[int]]] = {}
        """Layer -> the tasks of each role that return the gradient of its input, begun before that of its weights."""
        self.done_backward: list[list[int]] = [[-1] * len(roles) for _ in self.graph.layers]

    def _pairs(self) -> Iterable[tuple[Layer, Config]]:
        return zip(self.graph.layers, self.choice, strict=True)

    def run(self, all_roles: bool) -> Lowered:
        """Return all tasks, in an order in which each GPU's host could launch them."""
        self.before()
        for index in range(len(self.graph)):
            for number in range(len(self.graph.layers[index].inputs)):
                self._exchange(index, number, "forward")
            self.kernels(index, backward=False)
            self._statistics(index)
        if self.problem.training:
            self.backward()
        return Lowered(
            Plan(tuple(self.tasks)),
            self.hardware,
            tuple(self.purposes),
            tuple(self.layer_of),
            tuple(task.dur_ns for task in self.tasks),
            self.roles,
            all_roles,
        )

    def before(self) -> None:
        """Add the tasks before the forward pass: none here."""

    def backward(self) -> None:
        """Add the backward pass, concurrent sums of gradients in buckets, and the optimizer."""
        buckets = gradient_buckets(self.graph, self.choice, self.problem.bucket_bytes)
        full = {bucket.layers[-1]: bucket for bucket in buckets if bucket.full}
        syncs: list[list[int]] = [[] for _ in self.roles]
        for index in reversed(range(len(self.graph))):
            for user, number in self.users[index]:
                self._exchange(user, number, "backward")
            self.kernels(index, backward=True)
            self._statistics(index)
            self._sum_tied(index, syncs)
            if index in full:
                self._sum(full[index], syncs)
        for bucket in buckets:
            if not bucket.full:
                self._sum(bucket, syncs)
        for number, role in enumerate(self.roles):
            self.waiting[number] += syncs[number]
            self._optimizer(number, role)

    def kernels(self, index: int, *, backward: bool) -> None:
        """Add one pass of one layer on each role."""
        layer = self.graph.layers[index]
        late: list[list[Task]] = [[] for _ in self.roles]
        for number in range(len(self.roles)):
            share = self.shares[index][number]
            tasks = self._tasks(index, layer, share, backward)
            if backward and self._is_late(index):
                tasks, late[number] = self._in_two_parts(index, layer, share, tasks)
            for task in tasks:
                self.launch(number, task, "backward" if backward else "forward", index)
        if any(late):
            waits = {number: [*self.waiting[number], self.last_kernel[number]] for number in range(len(self.roles))}
            self.begun[index] = self._move(index, 0, "backward", waits)
        for number, tasks in enumerate(late):
            for task in tasks:
                self.launch(number, task, "backward", index)
            if backward:
                self.done_backward[index][number] = self.last_kernel[number]

    def _is_late(self, index: int) -> bool:
        """Whether the gradients of a layer's weights are computed while that of its input is on its way."""
        layer, config = self.graph.layers[index], self.choice[index]
        if layer.product is None or config.replicated or layer.inputs[0].source == BATCH:
            return False
        return not self.choice[layer.inputs[0].source].replicated and self._exchange_of(index, 0).backward_ns > 0

    def _in_two_parts(self, index: int, layer: Layer, share: Share, tasks: list[Task]) -> tuple[list[Task], list[Task]]:
        """Return the kernels of a backward pass before the exchange of the input's gradient, and those beside it."""
        times = self.problem.times
        if not tasks:
            return [], []
        if isinstance(times, TraceTimes):
            return times.backward_tasks(index, layer, share)
        whole = tasks[-1]
        part = times.share_ns(index, layer, share).late_ns / whole.dur_ns
        return [*tasks[:-1], *_shrunk(whole, 1 - part)], _shrunk(whole, part)

    def _tasks(self, index: int, layer: Layer, share: Share, backward: bool) -> list[Task]:
        if not all(share.output):
            return []
        times = self.problem.times
        if isinstance(times, TraceTimes):
            return times.tasks(index, layer, share, backward)
        tasks = []
        if backward and len(self.users[index]) > 1:  # captured layers have these kernels, a layer alone does not
            output_bytes = prod(share.output) * layer.element_bytes
            tasks.append(sum_kernel(len(self.users[index]), output_bytes, self.hardware))
        passes = times.share_ns(index, layer, share)
        dur_ns = passes.backward_ns if backward else passes.forward_ns
        if dur_ns > 0:
            work = (backward_work if backward else forward_work)(layer, share)
            tasks.append(made_up_kernel(layer.name, dur_ns, work.bytes, is_matrix(layer), self.hardware))
        return tasks

    def launch(self, number: int, task: Task, purpose: Purpose, layer: int) -> None:
        """Append a kernel to a role's stream."""
        deps = tuple(dict.fromkeys(self.waiting[number]))
        self.waiting[number] = []
        self.tasks.append(msgspec.structs.replace(task, device=number, queue=COMPUTE, deps=deps, op=-1))
        self.purposes.append(purpose)
        self.layer_of.append(layer)
        self.last_kernel[number] = len(self.tasks) - 1

    def _exchange(self, user: int, number: int, purpose: Literal["forward", "backward"]) -> None:
        """Move one input of a layer to the GPUs that need it, or its gradient back."""
        edge = self.graph.layers[user].inputs[number]
        if edge.source == BATCH or (edge.cut and purpose == "backward"):
            return
        if self.choice[edge.source].replicated:
            if purpose == "backward":
                self._share_gradient(user, edge)
            return
        if purpose == "backward" and user in self.begun:
            for role, tasks in self.begun.pop(user).items():
                self.waiting[role] += tasks
            self._pack(user, [back.after for _, back in self._exchange_of(user, number).packing])
            return
        self._move(user, number, purpose)

    def _move(
        self,
        user: int,
        number: int,
        purpose: Literal["forward", "backward"],
        waits: dict[int, list[int]] | None = None,
    ) -> dict[int, list[int]]:
        """Add the collective of one input in one direction, with packing. With `waits`, it is unpacked later."""
        exchange = self._exchange_of(user, number)
        backward = purpose == "backward"
        dur_ns = exchange.backward_ns if backward else exchange.forward_ns
        if dur_ns <= 0:
            return {}
        takes_part = [n for n, role in enumerate(self.roles) if role.gpu < exchange.gpus]
        packings = [both[backward] for both in exchange.packing]
        self._pack(user, [each.before for each in packings])
        waits = waits and {role: [*tasks, self.last_kernel[role]] for role, tasks in waits.items()}
        tasks = self.collective(takes_part, dur_ns, exchange.wire_bytes, "transfer", user, waits)
        if waits is None:
            self._pack(user, [each.after for each in packings])
        return tasks

    def _pack(self, user: int, kernels: Sequence[tuple[int, ...]]) -> None:
        """Launch the kernels that pack or unpack an input on each role, by their traffic."""
        for role, sizes in enumerate(kernels):
            for traffic in sizes:
                self.launch(role, streaming_kernel("copy", traffic, self.hardware), "copy", user)

    def _share_gradient(self, user: int, edge: Edge) -> None:
        """Sum the gradient of a layer that every GPU computes, with a part on each GPU."""
        pair = self.choice[edge.source], self.choice[user]
        dur_ns, size = shared_gradient(self.problem, self.graph.layers[edge.source], edge, *pair)
        if dur_ns > 0:
            wire = size * wire_share("all_reduce", self.problem.gpus)
            self.collective(list(range(len(self.roles))), dur_ns, wire, "transfer", user)

    def _exchange_of(self, user: int, number: int) -> _Exchange:
        """Return the redistribution of one input, made once for all plans of a problem with the same parts."""
        key = (user, number)
        if key not in self.exchanges:
            source = self.graph.layers[user].inputs[number].source
            parts = (user, number, self.choice[source], self.choice[user], self.gpus)
            known: dict[object, _Exchange] = self.problem.exchanges
            if parts not in known:
                known[parts] = self._new_exchange(user, number)
            self.exchanges[key] = known[parts]
        return self.exchanges[key]

    def _new_exchange(self, user: int, number: int) -> _Exchange:
        layer = self.graph.layers[user]
        source = layer.inputs[number].source
        configs = (self.choice[source],), (self.choice[user],)
        per_node = self.topology.gpus_per_node
        before = self.graph.layers[source]
        moved = transfers(before, configs[0], layer, number, configs[1], self.problem.gpus, per_node)
        size, gpus = layer.element_bytes, int(moved.gpus[0, 0])
        wire_bytes = float(moved.busiest[0, 0]) * size
        gather = gather_of(self.problem, before, self.choice[source], layer, number, self.choice[user])
        if gather is not None:
            times_ns = gather.forward_ns, gather.backward_ns
        else:
            found = exchange_ns(self.topology, moved.busiest[0] * size, moved.busiest_node[0] * size, gpus)
            times_ns = float(found[0]), float(found[0])
        if passes_moved(self.problem, layer.inputs[number], self.choice[user]) == 1:
            times_ns = times_ns[0], 0.0
        return _Exchange(*times_ns, wire_bytes, gpus, self._packing(user, number))

    def _packing(self, user: int, number: int) -> tuple[tuple[Packing, Packing], ...]:
        """Return what each role packs forward and backward. Pieces of GPUs on several nodes are not cut here."""
        layer = self.graph.layers[user]
        source = layer.inputs[number].source
        before, size, gpus = self.graph.layers[source], layer.element_bytes, self.problem.gpus
        if not self.problem.on_one_node:
            return ((Packing(), Packing()),) * len(self.roles)
        configs = self.choice[source], self.choice[user]
        edges = (pieces(before, configs[0], layer, number, configs[1], gpus, role.gpu) for role in self.roles)
        return tuple(
            packing(edge, before, part.output, size, direct=self.problem.direct)
            for edge, part in zip(edges, self.shares[source], strict=True)
        )

    def _statistics(self, index: int) -> None:
        """Add the exchange of BatchNorm statistics that parts share, once in each pass."""
        layer, config = self.graph.layers[index], self.choice[index]
        if not layer.statistics or config.replicated or not self.problem.training:
            return
        who = statistics_members(self.problem, config)
        size = layer.statistics * layer.element_bytes / config.c
        dur_ns = time_ns(self.topology, "all_reduce", size, who)
        if dur_ns > 0:
            takes_part = [n for n, role in enumerate(self.roles) if role.gpu < config.parts]
            wire = size * wire_share("all_reduce", who.gpus)
            self.collective(takes_part, dur_ns, wire, "statistics", index)

    def _sum(self, bucket: Bucket, syncs: list[list[int]]) -> None:
        """Sum the gradients of a bucket once the backward pass of its last layer is done."""
        who = weight_members(self.problem, bucket.config)
        dur_ns = sync_ns(self.topology, bucket.bytes, who)
        wire = bucket.bytes * wire_share("all_reduce", who.gpus)
        last = bucket.layers[-1]
        takes_part = [number for number, role in enumerate(self.roles) if role.gpu < bucket.config.parts]
        if self._reads_sums() and sums_by_reading(bucket, self.problem.gpus):
            self._sum_by_reading(bucket, takes_part)
            return
        if bucket.copied_bytes:
            for number in takes_part:
                self.launch(number, copy_kernel(bucket.copied_bytes, self.hardware), "copy", last)
                self.done_backward[last][number] = self.last_kernel[number]
        waits = {number: [self.done_backward[last][number]] for number in takes_part}
        for number, tasks in self.collective(takes_part, dur_ns, wire, "sync", last, waits).items():
            syncs[number] += tasks

    def _sum_tied(self, index: int, syncs: list[list[int]]) -> None:
        """Sum the gradients of weights that later layers use, too, over all GPUs, after those of each GPU."""
        layer = self.graph.layers[index]
        dur_ns, size = tied_ns(self.problem, layer), layer.tied_elements * layer.element_bytes
        if dur_ns <= 0:
            return
        everyone = list(range(len(self.roles)))
        users = sum(any(tie.layer == index for tie in each.tied) for each in self.graph.layers)
        for number in everyone:
            self.launch(number, streaming_kernel("sum", size * (2 + 3 * users), self.hardware), "copy", index)
        waits = {number: [self.last_kernel[number]] for number in everyone}
        wire = size * wire_share("all_reduce", self.problem.gpus)
        for number, tasks in self.collective(everyone, dur_ns, wire, "sync", index, waits).items():
            syncs[number] += tasks

    def _reads_sums(self) -> bool:
        """Whether GPUs share memory, which they do for exchanges."""
        return self.problem.direct and any(exchange.forward_ns > 0 for exchange in self.exchanges.values())

    def _sum_by_reading(self, bucket: Bucket, takes_part: Sequence[int]) -> None:
        """Gather the gradients of all GPUs, and add them."""
        gpus, last = self.problem.gpus, bucket.layers[-1]
        size, who = bucket.bytes * gpus, members(range(gpus), self.topology.gpus_per_node)
        dur_ns = time_ns(self.topology, "all_gather", size, who)
        self.collective(takes_part, dur_ns, size * wire_share("all_gather", gpus), "sync", last)
        for number in takes_part:
            self.launch(number, streaming_kernel("sum", size + bucket.bytes, self.hardware), "copy", last)

    def collective(
        self,
        takes_part: Sequence[int],
        dur_ns: float,
        wire_bytes: float,
        purpose: Purpose,
        layer: int,
        waits: dict[int, list[int]] | None = None,
    ) -> dict[int, list[int]]:
        """Add the tasks of one collective on each participating role. Without `waits`, the next kernels wait for it."""
        # A sum that the next kernels wait for is an exchange like others (`_sum_by_reading`).
        queue = SYNC if purpose == "sync" and waits is not None else TRANSFER
        ready = [
            task
            for number in takes_part
            for task in ((waits or {}).get(number) or [*self.waiting[number], self.last_kernel[number]])
            if task >= 0
        ]
        deps = tuple(dict.fromkeys(ready))
        tasks_of: dict[int, list[int]] = {}
        for number in takes_part:
            tasks = []
            if self.topology.collective_sms:
                traffic = wire_bytes * self.topology.dram_per_wire_byte
                tasks.append(collective_kernel(dur_ns, traffic, self.topology.collective_sms, self.hardware, purpose))
                tasks[-1] = msgspec.structs.replace(tasks[-1], device=number, queue=queue)
            share = self.hardware.memory.dram_bytes_per_ns
            link = len(self.roles) + number
            tasks.append(
                Task(name=f"{purpose} on the link", device=link, queue=queue, dur_ns=dur_ns, dram_bytes=dur_ns * share)
            )
            for task in tasks:
                self.tasks.append(msgspec.structs.replace(task, deps=deps))
                self.purposes.append(purpose)
                self.layer_of.append(layer)
                tasks_of.setdefault(number, []).append(len(self.tasks) - 1)
        if waits is None:
            for number, indices in tasks_of.items():
                self.waiting[number] += indices
        return tasks_of

    def _optimizer(self, number: int, role: Role) -> None:
        """Add the optimizer's kernels for the weights of one role."""
        weights = sum(
            weight_elements(layer, share)
            for layer, share in ((self.graph.layers[i], self.shares[i][number]) for i in range(len(self.graph)))
            if all(share.output)
        )
        total = sum(layer.weight_elements for layer in self.graph.layers)
        times = self.problem.times
        if isinstance(times, TraceTimes) and total:
            for task in times.optimizer_tasks:
                ratio = weights / total
                self.launch(number, _resized(task, ratio), "optimizer", -1)
            return
        dur_ns = times.optimizer_ns(weights)
        if dur_ns > 0:
            self.launch(
                number, made_up_kernel("optimizer", dur_ns, 20.0 * weights, False, self.hardware), "optimizer", -1
            )


@dataclass(frozen=True, slots=True)
class _Exchange:
    """One input's redistribution: its times, bytes on the busiest GPU's link, GPUs, and what each role packs."""

    forward_ns: float
    backward_ns: float
    wire_bytes: float
    gpus: int
    packing: tuple[tuple[Packing, Packing], ...]


def _shrunk(task: Task, part: float) -> list[Task]:
    """Return a part of a kernel; nothing of one that takes no time."""
    return [_resized(task, part)] if part > 0 else []


def _resized(task: Task, ratio: float) -> Task:
    if ratio >= 1.0:
        return task
    blocks = max(1, round(task.blocks * ratio)) if task.blocks else 0
    return msgspec.structs.replace(task, dur_ns=task.dur_ns * ratio, blocks=blocks, dram_bytes=task.dram_bytes * ratio)
