"""Chakra execution traces: `.et` (length-delimited protocol buffers) and its JSON variant.

Times are whole microseconds. mlcommons' own converter writes the program order as `data_deps`, so edges count as
assumed unless the file says otherwise; gpusim's export does so in the attribute `true_data_deps`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from gpusim.importers.edges import stream_edges
from gpusim.importers.model import Activity, Edge, Finding, ImportFileError, Profile, WorkLimit, lane_number, whole
from gpusim.importers.stream_json import EventFile
from gpusim.io.file_limits import MAX_DOCUMENT_BYTES, MAX_PARTS, MAX_STEP_NS
from gpusim.units import MIB, NS_PER_US, format_bytes

COMM_TYPES: Final = (5, 6, 7)
MAX_MESSAGE_BYTES: Final = 64 * MIB
TRUE_DATA, DURATION_NS, STREAM = "true_data_deps", "duration_nanos", "stream"


@dataclass(slots=True)
class _Node:
    number: int = 0
    name: str = ""
    type: int = 0
    start_us: int = 0
    dur_us: int = 0
    before: list[int] = field(default_factory=list)
    attributes: dict[str, Any] = field(default_factory=dict)


def read_chakra(pieces: Iterator[bytes], name: str) -> Profile:
    """Return the kernels of a `.et` file and their edges. Raises `ImportFileError`."""
    data = b"".join(pieces)
    if len(data) > MAX_DOCUMENT_BYTES // 4:
        raise ImportFileError(name, f"is larger than {format_bytes(MAX_DOCUMENT_BYTES // 4)}")
    messages = _messages(data, name)
    first = next(messages, None)
    if first is None:
        raise ImportFileError(name, "is empty")
    attributes = _attributes(first, 2, name)
    nodes: list[_Node] = []
    for message in messages:
        nodes.append(_node(message, name))
        if len(nodes) > MAX_PARTS:
            raise ImportFileError(name, f"has more than {MAX_PARTS} nodes")
    schema = attributes.get("schema")
    writer = f"Chakra (schema {schema})" if isinstance(schema, str) else "Chakra"
    return _profile(nodes, attributes, name, "chakra-et", writer)


class _JsonNode(msgspec.Struct):
    Id: Any = None
    Name: Any = None
    NodeType: Any = None
    runtime: Any = None
    data_deps: Any = None
    is_cpu_op: Any = None


def read_chakra_json(pieces: Iterator[bytes], name: str) -> Profile:
    """Return the kernels and edges of the JSON variant (`workload_graph`). Raises `ImportFileError`."""
    source = EventFile(pieces, name, "workload_graph", _JsonNode, ())
    nodes: list[_Node] = []
    for events in source.events():
        if len(nodes) + len(events) > MAX_PARTS:
            raise ImportFileError(name, f"has more than {MAX_PARTS} nodes")
        for event in events:
            before = event.data_deps if isinstance(event.data_deps, list) else []
            nodes.append(
                _Node(
                    whole(event.Id, 0),
                    event.Name if isinstance(event.Name, str) else "",
                    whole(event.NodeType, 0),
                    0,
                    max(0, whole(event.runtime, 0)),
                    [whole(number) for number in before],
                    {"is_cpu_op": bool(event.is_cpu_op)},
                )
            )
    if not nodes:
        raise ImportFileError(name, "is a Chakra trace without nodes in 'workload_graph': record the step again")
    return _profile(nodes, {}, name, "chakra-json", "Chakra (JSON)")


def _profile(nodes: list[_Node], attributes: dict[str, Any], name: str, kind: Any, writer: str) -> Profile:
    profile = Profile(file=name, format=kind, writer=writer, nodes=len(nodes), resolution_ns=NS_PER_US)
    work = [
        node for node in nodes if node.attributes.get("is_cpu_op") is False or node.attributes.get("is_cpu_op") == 0
    ]
    if not work:
        profile.has_times = False
        profile.findings.append(
            Finding(
                "no-kernels",
                f"none of its {len(nodes)} nodes ran on a GPU (is_cpu_op is true or missing)",
                "convert the execution trace together with its Kineto profile (chakra_trace_link)",
            )
        )
        return profile
    exact = all(DURATION_NS in node.attributes for node in work)
    with_starts = any(node.start_us for node in work)
    profile.has_times = with_starts
    places: dict[int, int] = {}
    clock_ns = 0
    order = sorted(work, key=lambda node: node.start_us) if with_starts else work
    for node in order:
        if node.dur_us > MAX_STEP_NS // NS_PER_US or not 0 <= node.start_us < 2**53:
            raise ImportFileError(name, f"node {node.number} takes {node.dur_us} us, more than any step")
        dur_ns = whole(node.attributes[DURATION_NS], 0) if exact else node.dur_us * NS_PER_US
        places[node.number] = len(profile.activities)
        profile.activities.append(
            Activity(
                kind="kernel",
                name=node.name,
                device=0,
                stream=lane_number(node.attributes.get(STREAM)),
                start_ns=node.start_us * NS_PER_US if with_starts else clock_ns,
                dur_ns=max(0, dur_ns),
            )
        )
        clock_ns += max(0, dur_ns)
    true = bool(attributes.get(TRUE_DATA))
    profile.read_origin(attributes)
    by_number = {node.number: node for node in nodes}
    edges: list[Edge] = []
    lost = 0
    limit = WorkLimit(name)
    for node in order:
        for number in _gpu_before(node, by_number, places, limit):
            before, after = places[number], places[node.number]
            if before < after:
                edges.append(Edge(before, after, "data" if true else "assumed"))
            else:
                lost += before != after
    if not true:  # kernels depend on operators alone there: without the operators' order, all could run at once
        edges += stream_edges(profile.activities, "assumed")
    profile.edges = edges
    profile.quality = "data" if true else "assumed"
    add = profile.findings.append
    if not true:
        add(
            Finding(
                "order-as-data",
                "Chakra's converter writes the program order as data dependencies: its edges count as assumed",
                "give the execution trace and the Kineto profile that it was converted from",
            )
        )
    if not exact:
        add(
            Finding(
                "integer-microseconds",
                "all times are whole microseconds: a kernel's time is right to ±1 µs",
                "give the Kineto profile that it was converted from",
            )
        )
    if not with_starts:
        add(
            Finding(
                "no-times",
                "it has durations but no starts, so concurrency is unknown",
                "give the Kineto profile",
            )
        )
    if lost:
        add(Finding("edges-against-order", f"{lost} dependencies go against the order of the file and are left out"))
    add(
        Finding(
            "no-registers",
            "it has no launch sizes, registers or shared memory: occupancy is unknown",
            "give the Kineto profile that it was converted from",
        )
    )
    add(Finding("no-gpu-properties", "the file does not name the GPU", "name it with --gpu"))
    return profile


def _gpu_before(node: _Node, by_number: dict[int, _Node], places: dict[int, int], limit: WorkLimit) -> set[int]:
    """Return the GPU nodes that a node waits for, directly or through operators on the CPU."""
    gpu_nodes: set[int] = set()
    seen: set[int] = set()
    todo = list(node.before)
    while todo:
        number = todo.pop()
        limit.spend(1)
        if number in seen or number not in by_number:
            continue
        seen.add(number)
        if number in places:
            gpu_nodes.add(number)
        else:
            todo += by_number[number].before
    return gpu_nodes


# --- Protocol buffers ---


def _messages(data: bytes, name: str) -> Iterator[bytes]:
    place = 0
    while place < len(data):
        size, place = _varint(data, place, name)
        if size > MAX_MESSAGE_BYTES or place + size > len(data):
            raise ImportFileError(name, f"is truncated or no Chakra trace: a message of {size} bytes at byte {place}")
        yield data[place : place + size]
        place += size


def _varint(data: bytes, place: int, name: str) -> tuple[int, int]:
    value = shift = 0
    while True:
        if place >= len(data) or shift > 63:
            raise ImportFileError(name, f"is truncated or no Chakra trace: a broken number at byte {place}")
        byte = data[place]
        place += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value & (2**64 - 1), place
        shift += 7


def _fields(data: bytes, name: str) -> Iterator[tuple[int, int, Any]]:
    """Yield number, wire type and value of each field of a message."""
    place = 0
    while place < len(data):
        key, place = _varint(data, place, name)
        wire = key & 7
        if wire == 0:
            value, place = _varint(data, place, name)
            yield key >> 3, wire, value
            continue
        size = {1: 8, 5: 4}.get(wire)
        if wire == 2:
            size, place = _varint(data, place, name)
        if size is None or place + size > len(data):
            raise ImportFileError(name, "is truncated or no Chakra trace: a field of unknown type")
        yield key >> 3, wire, data[place : place + size]
        place += size


def _node(data: bytes, name: str) -> _Node:
    node = _Node()
    for number, wire, value in _fields(data, name):
        if number == 1 and wire == 0:
            node.number = value
        elif number == 2 and wire == 2:
            node.name = value.decode("utf-8", "replace")
        elif number == 3 and wire == 0:
            node.type = value
        elif number == 5:
            node.before += _numbers(value, wire, name)
        elif number == 6 and wire == 0:
            node.start_us = value
        elif number == 7 and wire == 0:
            node.dur_us = value
        elif number == 10 and wire == 2:
            key, attribute = _attribute(value, name)
            node.attributes[key] = attribute
    return node


def _numbers(value: Any, wire: int, name: str) -> list[int]:
    if wire == 0:
        return [value]
    if wire != 2:
        return []
    numbers, place = [], 0
    while place < len(value):
        number, place = _varint(value, place, name)
        numbers.append(number)
    return numbers


def _attributes(data: bytes, number: int, name: str) -> dict[str, Any]:
    return dict(_attribute(value, name) for tag, wire, value in _fields(data, name) if tag == number and wire == 2)


def _attribute(data: bytes, name: str) -> tuple[str, Any]:
    key, content = "", None
    for number, wire, value in _fields(data, name):
        if number == 1 and wire == 2:
            key = value.decode("utf-8", "replace")
        elif wire == 0:
            content = bool(value) if number == 27 else value
        elif number == 3 and wire == 1:
            content = struct.unpack("<d", value)[0]
        elif number == 29 and wire == 2:
            content = value.decode("utf-8", "replace")
    return key, content
