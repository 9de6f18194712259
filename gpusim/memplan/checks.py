"""Whether a memory plan can run: nothing is read before it is there, nothing overwritten while a copy reads it.

Two checks that know nothing of each other. `check_program` follows the instructions, as the host issues them, and what
each wait makes known; it also holds every value that an op reads to the one it read in the captured step.
`check_timeline` looks at the start and end of each task of a simulated (or measured) run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Final

from gpusim.errors import PlanError
from gpusim.memplan.lowering import LoweredProgram
from gpusim.memplan.plan import MemoryPlan
from gpusim.memplan.program import Instruction, Program, needed
from gpusim.memplan.storages import Storages

#: Advice where a trace lacks workspaces of variants.
CAPTURE_VARIANTS: Final = "`gpusim capture --variants` measures it"


def check_memory_plan(storages: Storages, plan: MemoryPlan) -> MemoryPlan:
    """Return the plan itself, once its numbers are known to make sense for this trace; `check_program` does the rest.

    Raises `PlanError` for a plan of another trace, an op, a variant or a storage that there is not, a storage that the
    ops of its recomputation do not make, a variant that memory plans cannot run, and for an order that has not every op
    once or goes against the dependencies.
    """
    if plan.trace_hash and plan.trace_hash != storages.trace_hash:
        raise PlanError(f"the memory plan is one of another trace, not of this '{storages.trace.name}'")
    ops, count = len(storages.trace.ops), len(storages)
    for offload in plan.offloads:
        _within(offload.storage, count, "storage")
        for op in (offload.after, offload.free, offload.back):
            _within(op, ops, "op")
    for redo in plan.redos:
        for op in (redo.before, *redo.ops):
            _within(op, ops, "op")
        for storage in redo.storages:
            _within(storage, count, "storage")
        lacking = set(redo.storages).difference(*(storages.writes[op] for op in redo.ops))
        if lacking:
            reader = storages.trace.ops[redo.before].name
            raise PlanError(f"no op that runs again before op '{reader}' makes storage {min(lacking)}")
    for storage in plan.held:
        _within(storage, count, "storage")
    for op in plan.barriers:
        _within(op, ops, "op")
    _check_variants(storages, plan)
    if plan.op_streams and (len(plan.op_streams) != ops or min(plan.op_streams) < 0):
        raise PlanError(f"the memory plan has streams for {len(plan.op_streams)} ops, of {ops}")
    if plan.order:
        if sorted(plan.order) != list(range(ops)):
            raise PlanError(f"the order of the memory plan does not have each of the {ops} ops once")
        place = {op: number for number, op in enumerate(plan.order)}
        for op, before in enumerate(storages.preds):
            for other in before:
                if place[other] > place[op]:
                    names = storages.trace.ops
                    raise PlanError(f"op '{names[op].name}' comes before '{names[other].name}', whose result it needs")
    return plan


def _check_variants(storages: Storages, plan: MemoryPlan) -> None:
    ops = storages.trace.ops
    if len(plan.variants) not in (0, len(ops)):
        raise PlanError(f"the memory plan has variants for {len(plan.variants)} ops, of {len(ops)}")
    for op, number in zip(ops, plan.variants, strict=False):
        if not 0 <= number <= len(op.variants):
            raise PlanError(f"op '{op.name}' has no variant {number}, of {len(op.variants)}")
        if not number:
            continue
        variant = op.variants[number - 1]
        if variant.covers:
            raise PlanError(
                f"variant '{variant.name}' of op '{op.name}' runs other ops, too; memory plans take none such"
            )
        if variant.workspace_bytes is None:
            raise PlanError(
                f"the workspace of variant '{variant.name}' of op '{op.name}' is unknown; {CAPTURE_VARIANTS}"
            )


def _within(number: int, count: int, what: str) -> None:
    if not 0 <= number < count:
        raise PlanError(f"the memory plan names {what} {number}, of {count}")


@dataclass
class _State:
    """State of the check after the instructions so far."""

    there: set[int]
    version: dict[int, int] = field(default_factory=dict)
    """Storage -> the op that wrote it last, of those on the GPU."""
    on_host: dict[int, int] = field(default_factory=dict)
    """Storage -> the version that its host buffer has, or will have once the copy has ended."""
    leaving: set[int] = field(default_factory=set)
    """Copies out that nothing has waited for."""


def check_program(storages: Storages, program: Program) -> None:
    """Raise `PlanError` for the first instruction that cannot run, naming op and storage."""
    state = _State(there=set(storages.initial))
    names = [op.name for op in storages.trace.ops]
    ran: set[int] = set()
    for instruction in program:
        problem = _problem_with(storages, state, ran, instruction)
        if problem:
            what = f"op '{names[instruction.op]}'" if instruction.op >= 0 else f"storage {instruction.storage}"
            raise PlanError(f"memory plan: {instruction.kind} of {what}: {problem}")
        _follow(storages, state, ran, instruction)
    if len(ran) != len(names):
        raise PlanError(f"memory plan: it runs {len(ran)} of {len(names)} ops")
    missing = (storages.initial | storages.results) - state.there
    if missing:
        raise PlanError(f"memory plan: storage {min(missing)}, a result of the step, is gone at its end")


def _problem_with(storages: Storages, state: _State, ran: set[int], instruction: Instruction) -> str:
    storage, op = instruction.storage, instruction.op
    if instruction.kind == "run":
        if op in ran:
            return "it has run"
        makes = frozenset(storages.makes[op])
        return _values(storages, state, op, storages.touched[op] - makes) or _unwritten(state, storages.writes[op])
    if instruction.kind == "again":
        if op not in ran:
            return "it has not run yet"
        if not storages.may_run_again[op]:
            return "it draws random numbers or changes a state of the step"
        makes = frozenset(storages.makes[op])
        states = storages.states[op]
        outside = storages.writes[op] - makes - states - instruction.bring
        if outside:
            return f"it would change storage {min(outside)}, which is not computed again"
        twice = instruction.bring & makes & state.there
        if twice:
            return f"storage {min(twice)} is there"
        return _values(storages, state, op, storages.touched[op] - makes - states) or _unwritten(
            state, instruction.bring
        )
    if instruction.kind == "out":
        return "" if storage in state.there else "it is not there"
    if instruction.kind == "free":
        if storage in storages.initial:
            return "it is there before the step and stays"
        return "" if storage in state.there else "it is not there"
    if instruction.kind == "back":
        if storage in state.there:
            return "it is there"
        return "" if storage in state.on_host else "it was not copied out"
    return ""


def _values(storages: Storages, state: _State, op: int, wanted: frozenset[int]) -> str:
    """Return the problem with the values that an op would read: missing, or not those of the captured step."""
    for storage in sorted(wanted):
        if storage not in state.there:
            return f"storage {storage} is not there"
        then, now = storages.version_read[op].get(storage, -1), state.version.get(storage, -1)
        if then != now and storage in storages.reads[op]:  # a view looks at no value
            writer = f"op '{storages.trace.ops[now].name}'" if now >= 0 else "the start of the step"
            return f"storage {storage} has the value of {writer}, another than in the captured step"
    return ""


def _unwritten(state: _State, written: frozenset[int]) -> str:
    """Return the problem with changing these storages: a copy out may still read one of them."""
    read = written & state.leaving
    return f"storage {min(read)} would be overwritten while it is copied out" if read else ""


def _follow(storages: Storages, state: _State, ran: set[int], instruction: Instruction) -> None:
    storage, op = instruction.storage, instruction.op
    if instruction.kind in ("run", "again"):
        changed = storages.writes[op] if instruction.kind == "run" else instruction.bring
        if instruction.kind == "run":
            ran.add(op)
            state.there |= storages.touched[op]
        state.there |= changed
        for each in changed:
            state.version[each] = op
    elif instruction.kind == "out":
        state.on_host[storage] = state.version.get(storage, -1)
        state.leaving.add(storage)
    elif instruction.kind == "free":
        state.there.discard(storage)
        state.leaving.discard(storage)
    elif instruction.kind == "back":
        state.there.add(storage)
        state.version[storage] = state.on_host[storage]
    elif instruction.kind == "barrier":
        state.leaving.clear()


def check_timeline(lowered: LoweredProgram, start_ns: Sequence[int], end_ns: Sequence[int], storages: Storages) -> None:
    """Raise `PlanError` where a task reads what is still being copied back, or memory is reused under a copy.

    `start_ns` and `end_ns` are of the tasks of `lowered.plan`, simulated or measured.
    """
    problems = [_overlaps(lowered, start_ns, end_ns, storages)]
    if lowered.waits is not None:
        problems.append(_races(lowered, start_ns, end_ns, storages))
    for problem in chain.from_iterable(problems):
        raise PlanError(f"memory plan: {problem}")


def _races(
    lowered: LoweredProgram, start_ns: Sequence[int], end_ns: Sequence[int], storages: Storages
) -> Iterator[str]:
    """Compare the times of ops on several streams: values are read after they are there, memory is used again after its
    users, both by what each op touches, and not by the waits of the plan.
    """
    names = [op.name for op in storages.trace.ops]
    ran_ns: dict[int, int] = {}
    used_ns: dict[int, int] = {}
    """Storage -> the end of the last use of its memory."""
    owner: dict[int, int] = {}
    free_ns: dict[int, int] = {}
    """Stream -> when all memory that was freed to it is unused."""
    brought_ns: dict[int, int] = {}
    for instruction, tasks in zip(lowered.program, lowered.tasks_of, strict=True):
        kind, storage, stream = instruction.kind, instruction.storage, instruction.stream
        begin = min((start_ns[task] for task in tasks), default=0)
        end = max((end_ns[task] for task in tasks), default=0)
        if kind == "free":
            at = owner.get(storage, 0)
            free_ns[at] = max(free_ns.get(at, 0), used_ns.pop(storage, 0))
            continue
        made: tuple[int, ...] = (storage,) if kind == "back" else ()
        if kind in ("run", "again"):
            made = storages.makes[instruction.op]
            made = made if kind == "run" else tuple(each for each in made if each in instruction.bring)
            name = names[instruction.op]
            late = [
                before for before in storages.working_preds[instruction.op] if tasks and ran_ns.get(before, 0) > begin
            ]
            if late:
                yield f"op '{name}' starts before '{names[late[0]]}' has ended, whose result it needs"
            late = [each for each in needed(storages, instruction) if tasks and brought_ns.get(each, 0) > begin]
            if late:
                yield f"op '{name}' starts before storage {late[0]} is back"
        if tasks and made and begin < free_ns.get(stream, 0):
            yield f"storage {made[0]} gets memory that another stream still uses"
        owner.update(dict.fromkeys(made, stream))
        used_ns.update(dict.fromkeys(made, 0))
        for each in needed(storages, instruction):
            used_ns[each] = max(used_ns.get(each, 0), end)
        if kind == "run":
            ran_ns[instruction.op] = end
        elif kind == "again":
            brought_ns.update(dict.fromkeys(instruction.bring, end))
        elif kind == "back":
            brought_ns[storage] = end


def _overlaps(
    lowered: LoweredProgram, start_ns: Sequence[int], end_ns: Sequence[int], storages: Storages
) -> Iterator[str]:
    """Walk the instructions once more, with the times of their tasks."""
    back_until: dict[int, int] = {}
    out_until: dict[int, int] = {}
    names = storages.trace.ops
    for instruction, tasks in zip(lowered.program, lowered.tasks_of, strict=True):
        if not tasks:
            continue
        begin, end = min(start_ns[t] for t in tasks), max(end_ns[t] for t in tasks)
        if instruction.kind == "out":
            out_until[instruction.storage] = end
        elif instruction.kind == "back":
            if begin < out_until.get(instruction.storage, 0):
                yield f"storage {instruction.storage} comes back before its copy out has ended"
            back_until[instruction.storage] = end
        else:
            op = instruction.op
            written = storages.writes[op] if instruction.kind == "run" else instruction.bring
            for storage in needed(storages, instruction):
                if begin < back_until.get(storage, 0):
                    yield f"op '{names[op].name}' starts before storage {storage} is back"
            for storage in written:
                if begin < out_until.get(storage, 0):
                    yield f"op '{names[op].name}' writes storage {storage} while it is copied out"
