"""Joins of files of one run: a profile with its execution trace, an Nsight Compute table, or a CUDA graph.

A join that does not fit is an error, never partial.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from gpusim.formats.trace import EdgeKind, Quality
from gpusim.importers.cuda_graph import GraphDump
from gpusim.importers.execution_trace import Operator, OperatorTrace, StorageKey
from gpusim.importers.model import Activity, Edge, Finding, ImportFileError, Profile, WorkLimit

#: Least share of the operators with kernels, or of their time, that must be found in the other file.
MIN_MATCHED = 0.95
#: Most consecutive operators that only one of the files has.
LOOK_AHEAD = 64
#: Operators in a row that must agree at the beginning.
WINDOW = 8
#: Prefixes of operators that allocate memory; they launch nothing.
ALLOCATE = ("aten::empty", "aten::new_empty")
#: Deepest nesting of calls that is followed.
MAX_CALLS = 64
_SPACES = re.compile(r"\s+")
#: Start of a mangled name, and the length before each of its parts.
_MANGLED, _SIZE = re.compile(r"_ZN?[KVr]*(?:St)?"), re.compile(r"[0-9]{1,4}")
#: Operators where the host reads a value of the GPU, so that all later work waits for it.
HOST_READS = ("aten::_local_scalar_dense", "aten::item")


@dataclass(slots=True)
class Joined:
    """Edges of a join, their quality, and its findings."""

    edges: list[Edge]
    quality: Quality
    findings: list[Finding]
    calls: dict[int, int] = field(default_factory=dict)
    """Record -> position of its operator call in the execution trace."""
    moved_bytes: dict[int, int] = field(default_factory=dict)
    """Position of an operator call -> bytes of the operator's tensors."""


def join_operators(activities: Sequence[Activity], profile: Profile, trace: OperatorTrace) -> Joined:
    """Derive data dependencies of the records from the reads and writes of their operators. Raises
    `ImportFileError`.
    """
    matched, how = _by_record_function(activities, trace), "record function ids"
    if matched is None:
        matched, how = _by_names(activities, profile, trace), "the sequence of operator names"
    if matched is None:
        problem = f"is not of the same run as {profile.file}: neither ids nor names of operators agree"
        raise ImportFileError(trace.file, problem)
    in_all = max(1, sum(activity.dur_ns for activity in activities))
    known = sum(activity.dur_ns for index, activity in enumerate(activities) if index in matched)
    edges = _data_edges(activities, matched, _Memory(trace.operators))
    quality: Quality = "data" if known / in_all >= MIN_MATCHED else "assumed"
    text = f"{known / in_all:.1%} of the time is tied to operators of {trace.file} by {how}"
    findings = [Finding("joined-operators", text)] if known < in_all else []
    if any(operator.unknown_roles for operator in matched.values()):
        text = "an execution trace lacks the writes of Triton kernels: they count as writing all of their tensors"
        findings.append(Finding("unknown-roles", text))
    places = {operator.number: place for place, operator in enumerate(trace.operators)}
    calls = {index: places[operator.number] for index, operator in matched.items()}
    moved_bytes = {calls[index]: operator.moved_bytes for index, operator in matched.items()}
    return Joined(edges, quality, findings, calls, moved_bytes)


def _by_record_function(activities: Sequence[Activity], trace: OperatorTrace) -> dict[int, Operator] | None:
    """Match records with operators by id; None where fewer than `MIN_MATCHED` have one of the same name."""
    by_id = {operator.record_function: operator for operator in trace.operators if operator.record_function >= 0}
    operator_of: dict[int, Operator] = {}
    with_op = 0
    for index, activity in enumerate(activities):
        if activity.op_call < 0:
            continue
        with_op += 1
        operator = by_id.get(activity.record_function)
        if operator is not None and operator.name == activity.op:
            operator_of[index] = operator
    return operator_of if operator_of and len(operator_of) >= MIN_MATCHED * with_op else None


def _by_names(activities: Sequence[Activity], profile: Profile, trace: OperatorTrace) -> dict[int, Operator] | None:
    """Match records with operators by the sequence of all names, with a few operators in one file alone."""
    numbers = [activity.op_call for activity in activities if activity.op_call >= 0]
    if not numbers:
        return None
    first, last = min(numbers), max(numbers)
    wanted = profile.calls[first : last + 1]
    operators = [operator for operator in trace.operators if not operator.name.startswith("[pytorch|")]
    names = [operator.name for operator in operators]
    length = min(WINDOW, len(wanted))
    places: dict[str, list[int]] = {}
    for place, name in enumerate(names):
        places.setdefault(name, []).append(place)
    work = WorkLimit(trace.file)
    for offset in range(min(LOOK_AHEAD, len(wanted) - length + 1)):
        tried = 0
        for place in places.get(wanted[offset], ()):
            if names[place : place + length] != wanted[offset : offset + length]:
                continue
            tried += 1
            if tried > 16:
                break
            pairs = _aligned(wanted, names, offset, place, work)
            work.spend(len(activities) + len(pairs))
            operator_of = {
                index: operators[pairs[activity.op_call - first]]
                for index, activity in enumerate(activities)
                if activity.op_call - first in pairs and activity.op_call >= 0
            }
            if len(operator_of) >= MIN_MATCHED * len(numbers):
                return operator_of
    return None


def _aligned(wanted: Sequence[str], names: Sequence[str], offset: int, place: int, work: WorkLimit) -> dict[int, int]:
    """Return positions of equal names in two sequences, skipping entries that only one of them has."""
    pairs: dict[int, int] = {}
    a, b = offset, place
    while a < len(wanted) and b < len(names):
        if wanted[a] == names[b]:
            pairs[a] = b
            a, b = a + 1, b + 1
            continue
        step = next(
            (
                (left, total - left)
                for total in range(1, LOOK_AHEAD)
                for left in range(total + 1)
                if wanted[a + left : a + left + 3] == names[b + total - left : b + total - left + 3]
                and a + left < len(wanted)
            ),
            None,
        )
        total = LOOK_AHEAD if step is None else sum(step)
        work.spend(total * total)
        if step is None:
            break
        a, b = a + step[0], b + step[1]
    return pairs


class _Memory:
    """Program positions of memory allocations, for operators in program order."""

    def __init__(self, operators: Sequence[Operator]) -> None:
        self.operators = {operator.number: operator for operator in operators}
        self.place = {operator.number: place for place, operator in enumerate(operators)}
        self.allocated: dict[StorageKey, list[tuple[int, Operator]]] = {}
        """Storage -> position and operator of each allocation, in order."""
        for place, operator in enumerate(operators):
            if operator.name.startswith(ALLOCATE):
                for storage in operator.writes:
                    self.allocated.setdefault(storage, []).append((place, operator))

    def is_within(self, operator: Operator, outer: Operator) -> bool:
        """Whether an operator is another one, or was called by it."""
        number, depth = operator.number, 0
        while number in self.operators and depth < MAX_CALLS:
            if number == outer.number:
                return True
            number, depth = self.operators[number].parent, depth + 1
        return False

    def is_other(self, storage: StorageKey, before: Operator, after: Operator) -> bool:
        """Whether a storage was allocated anew between two operators, so that they use different memory."""
        some = self.allocated.get(storage, [])
        at = bisect_left(some, self.place[after.number], key=lambda item: item[0]) - 1
        if at < 0 or some[at][0] < self.place[before.number]:
            return False
        return not self.is_within(some[at][1], before)


def _data_edges(activities: Sequence[Activity], matched: dict[int, Operator], memory: _Memory) -> list[Edge]:
    """Return edges from reads and writes.

    Storage ids are addresses, which are reused. An operator that writes a storage it did not receive has created it,
    and does not wait for earlier users of the address. Neither does one whose storage was allocated since.
    """
    operators = memory.operators
    edge_kinds: dict[tuple[int, int], EdgeKind] = {}
    writer: dict[StorageKey, int] = {}
    """Storage -> last record that wrote it."""
    readers: dict[StorageKey, list[int]] = {}
    last_of_call: dict[int, int] = {}
    last_on_lane: dict[tuple[int, int, int], int] = {}
    unmatched_on_lane: set[tuple[int, int, int]] = set()
    host_read = -1
    for index, activity in enumerate(activities):

        def edge(before: int, kind: EdgeKind, after: int = index) -> None:
            if 0 <= before < after:
                edge_kinds.setdefault((before, after), kind)

        edge(host_read, "event")
        operator = matched.get(index)
        previous = last_on_lane.get(activity.lane, -1)
        if operator is None or activity.lane in unmatched_on_lane:
            edge(previous, "stream")
        unmatched_on_lane.discard(activity.lane)
        last_on_lane[activity.lane] = index
        if operator is None:
            unmatched_on_lane.add(activity.lane)
            continue
        again = last_of_call.get(operator.number, -1)
        last_of_call[operator.number] = index
        kind: EdgeKind = "assumed" if operator.unknown_roles else "data"
        if again >= 0:
            edge(again, "stream")
        reads, writes = set(operator.reads), set(operator.writes)
        for storage in (*operator.reads, *operator.writes):
            if storage in writer and memory.is_other(storage, matched[writer[storage]], operator):
                del writer[storage]
        for storage in operator.reads:
            if storage in writer and writer[storage] != again:
                edge(writer[storage], kind)
        for storage in operator.writes:
            if (
                again < 0
                and storage not in reads
                and not _made_inside(writer.get(storage), matched, operator, operators)
            ):
                writer.pop(storage, None)
                readers.pop(storage, None)
            edge(writer.get(storage, -1), kind)
            for reader in readers.get(storage, ()):
                if not memory.is_other(storage, matched[reader], operator):
                    edge(reader, kind)
            writer[storage] = index
            readers[storage] = []
        for storage in operator.reads:
            if storage not in writes:
                readers.setdefault(storage, []).append(index)
        if activity.op in HOST_READS:
            host_read = index
    return [
        Edge(before, after, kind)
        for (before, after), kind in sorted(edge_kinds.items(), key=lambda item: item[0][::-1])
    ]


def _made_inside(
    writer: int | None, matched: dict[int, Operator], operator: Operator, operators: dict[int, Operator]
) -> bool:
    """Whether the last writer of a storage is an operator that this one called."""
    if writer is None or writer not in matched:
        return False
    number, depth = matched[writer].parent, 0
    while number in operators and depth < MAX_CALLS:
        if number == operator.number:
            return True
        number, depth = operators[number].parent, depth + 1
    return False


def join_graph(activities: Sequence[Activity], profile: Profile, dump: GraphDump) -> Joined:
    """Return the true edges of a CUDA graph for the records of one replay of it. Raises `ImportFileError`."""
    nodes_of_work = [node for node in dump.nodes if node.kind in ("kernel", "memcpy", "memset")]
    by_tools_id = {node.tools_id: node.index for node in nodes_of_work if node.tools_id}
    place: dict[int, int] = {}
    """Node -> its record."""
    if by_tools_id:
        for index, activity in enumerate(activities):
            if activity.graph_node in by_tools_id:
                place.setdefault(by_tools_id[activity.graph_node], index)
    if not place:
        from_graph = [index for index, activity in enumerate(activities) if activity.shared_launch]
        left: dict[tuple[str, object], deque[int]] = {}
        matched_records: set[int] = set()
        for node in (node for node in nodes_of_work if node.kind == "kernel"):
            for key in dict.fromkeys((_name(node.name), _base(node.name))):
                left.setdefault((key, node.grid), deque()).append(node.index)
        for by_name in (_name, _base):
            for index in from_graph:
                name = by_name(activities[index].name)
                for grid in (activities[index].grid, None):
                    nodes_left = left.get((name, grid), deque())
                    while nodes_left and nodes_left[0] in place:
                        nodes_left.popleft()
                    if nodes_left and index not in matched_records:
                        place[nodes_left.popleft()] = index
                        matched_records.add(index)
    kernels = sum(node.kind == "kernel" for node in nodes_of_work)
    if not place or sum(activities[index].kind == "kernel" for index in place.values()) < MIN_MATCHED * kernels:
        raise ImportFileError(dump.file, f"its {kernels} kernels differ from those of one replay in {profile.file}")
    nodes = {node.index: node for node in dump.nodes}
    matched = {index: node for node, index in place.items()}
    found_edges: dict[tuple[int, int], EdgeKind] = {}
    last_on_lane: dict[tuple[int, int, int], int] = {}
    lost = 0
    work = WorkLimit(dump.file)
    for index, activity in enumerate(activities):
        if index not in matched:
            if activity.lane in last_on_lane:
                found_edges.setdefault((last_on_lane[activity.lane], index), "stream")
        else:
            seen: set[int] = set()
            todo = list(nodes[matched[index]].before)
            while todo:
                number = todo.pop()
                work.spend(1)
                if number in seen:
                    continue
                seen.add(number)
                if number not in place:
                    todo += nodes[number].before
                elif place[number] < index:
                    found_edges[place[number], index] = "graph"
                else:
                    lost += 1
        last_on_lane[activity.lane] = index
    findings = []
    if lost:
        findings.append(
            Finding("edges-against-order", f"{lost} edges of the graph go against the order in {profile.file}")
        )
    share = sum(activities[index].dur_ns for index in matched) / max(1, sum(a.dur_ns for a in activities))
    edges = [Edge(*pair, kind) for pair, kind in sorted(found_edges.items(), key=lambda item: item[0][::-1])]
    return Joined(edges, "graph" if share >= MIN_MATCHED else "assumed", findings)


def join_counters(activities: Sequence[Activity], table: Profile) -> list[Finding]:
    """Copy the table's counters to the kernels, in place; the nth kernel of a name and launch size gets the nth row.

    Raises `ImportFileError` where none fits.
    """
    left: dict[object, deque[Activity]] = {}
    for kernel in table.activities:
        left.setdefault((_name(kernel.name), kernel.grid, kernel.block), deque()).append(kernel)
        left.setdefault((_base(kernel.name), kernel.grid, kernel.block), deque()).append(kernel)
    used: set[int] = set()
    kernels = [activity for activity in activities if activity.kind == "kernel"]
    with_counters = 0
    for activity in kernels:
        for key in (_name(activity.name), _base(activity.name)):
            rows = left.get((key, activity.grid, activity.block), deque())
            while rows and id(rows[0]) in used:
                rows.popleft()
            if rows:
                row = rows.popleft()
                used.add(id(row))
                activity.counters = row.counters or activity.counters
                if row.regs_per_thread is not None:
                    activity.regs_per_thread = row.regs_per_thread
                if row.smem_static_bytes + row.smem_dynamic_bytes:
                    activity.smem_static_bytes, activity.smem_dynamic_bytes = (
                        row.smem_static_bytes,
                        row.smem_dynamic_bytes,
                    )
                with_counters += 1
                break
    if not with_counters:
        raise ImportFileError(table.file, "none of its kernels, by name, grid and block, is in the step of the profile")
    if with_counters == len(kernels):
        return []
    text = f"{with_counters} of {len(kernels)} kernels have a row in {table.file}; the others have no counters"
    return [Finding("joined-counters", text, "profile the same step with ncu, without skipping kernels")]


def _name(name: str) -> str:
    return _SPACES.sub("", name.replace("(anonymous namespace)", "<unnamed>"))


def _base(name: str) -> str:
    """Return a kernel's name without return type, template arguments, parameters and namespaces."""
    mangled = _MANGLED.match(name)
    if mangled:
        return _last_part(name, mangled.end())
    text = name.replace("(anonymous namespace)", "_").replace("<unnamed>", "_")
    cut = min((at for mark in "<(" if (at := text.find(mark)) > 0), default=len(text))
    return text[:cut].rpartition(" ")[2].rpartition("::")[2]


def _last_part(mangled: str, at: int) -> str:
    """Return the innermost name of a mangled one (Itanium C++ ABI, section 5.1), whose parts follow their lengths."""
    part = ""
    while size := _SIZE.match(mangled, at):
        at = size.end() + int(size[0])
        part = mangled[size.end() : at]
    return part or mangled
