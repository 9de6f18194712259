"""Execution traces of PyTorch: operators with the tensors they read and write, without kernel times.

All schemas are read: 1.0.1 has `inputs` as a list and a separate `rf_id`, later ones `inputs.values` and `attrs`. An
operator writes its results and the arguments that its schema marks `(a!)`. Tensor ids name values, storage ids memory.
Both are addresses on the host, which a later tensor of any device gets again.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import msgspec

from gpusim.importers.model import MAX_NAME, Finding, ImportFileError, Profile, whole
from gpusim.importers.stream_json import EventFile
from gpusim.io.file_limits import MAX_PARTS, MAX_STORAGE_BYTES

MAX_TENSOR_DEPTH: Final = 8

StorageKey: TypeAlias = tuple[int, str]
"""Id and device of a storage: a number read as a CPU tensor can have the id of a freed GPU tensor."""


class _Node(msgspec.Struct):
    id: Any = None
    name: Any = None
    parent: Any = None
    ctrl_deps: Any = None
    rf_id: Any = None
    op_schema: Any = None
    inputs: Any = None
    outputs: Any = None
    attrs: Any = None
    tid: Any = None


@dataclass(slots=True)
class Operator:
    """One operator call."""

    number: int
    name: str
    parent: int
    record_function: int
    reads: tuple[StorageKey, ...] = ()
    """Storages whose values the operator uses."""
    writes: tuple[StorageKey, ...] = ()
    makes: tuple[int, ...] = ()
    """Tensor ids of its results."""
    takes: tuple[int, ...] = ()
    """Tensor ids of its arguments."""
    children: int = 0
    thread: int = 0
    moved_bytes: int = 0
    """Size of its arguments and results, in bytes."""
    unknown_roles: bool = False
    """Whether its writes are unknown, as for a Triton kernel: then all of its tensors count as written."""


@dataclass(slots=True)
class OperatorTrace:
    """Operators of an execution trace, in order of begin."""

    file: str
    schema: str
    operators: list[Operator]
    profile: Profile
    """Description for `gpusim doctor`."""


def read_execution_trace(pieces: Iterator[bytes], name: str) -> OperatorTrace:
    """Read the operators of an execution trace. Raises `ImportFileError`."""
    source = EventFile(pieces, name, "nodes", _Node, ("schema", "pid", "time"))
    operators: list[Operator] = []
    for nodes in source.events():
        if len(operators) + len(nodes) > MAX_PARTS:
            raise ImportFileError(name, f"has more than {MAX_PARTS} nodes")
        operators += [_operator(node) for node in nodes]
    schema = source.rest.get("schema")
    if not isinstance(schema, str) or not re.fullmatch(
        r"\d{1,3}\.\d{1,3}\.\d{1,3}(-chakra\.\d{1,3}\.\d{1,3}\.\d{1,3})?", schema
    ):
        raise ImportFileError(name, "is not a PyTorch execution trace: 'schema' is not a version")
    if not operators:
        raise ImportFileError(name, "is an execution trace without nodes: record the step again")
    operators.sort(key=lambda op: (op.record_function if op.record_function >= 0 else op.number, op.number))
    numbers = {operator.number: operator for operator in operators}
    for operator in operators:
        parent = numbers.get(operator.parent)
        if parent is not None and parent is not operator:
            parent.children += 1
    profile = Profile(
        file=name,
        format="execution-trace",
        writer=f"PyTorch ExecutionTraceObserver (schema {schema})",
        has_times=False,
        nodes=len(operators),
    )
    profile.quality = "data"
    profile.findings.append(
        Finding(
            "no-kernels",
            "an execution trace has operators with their reads and writes, but no kernels and no times",
            "give it together with the profile of the same run: `gpusim import PROFILE.json ET.json`",
        )
    )
    if not any(operator.record_function >= 0 for operator in operators):
        profile.findings.append(
            Finding("no-record-functions", "no node has an rf_id: only the sequence of names ties it to a profile", "")
        )
    return OperatorTrace(name, schema, operators, profile)


def _operator(node: _Node) -> Operator:
    attributes = (
        {str(entry.get("name")): entry.get("value") for entry in node.attrs if isinstance(entry, dict)}
        if isinstance(node.attrs, list)
        else {}
    )
    inputs, outputs = _values(node.inputs), _values(node.outputs)
    schema = attributes.get("op_schema", node.op_schema)
    schema = schema if isinstance(schema, str) else ""
    parent = whole(node.parent, whole(node.ctrl_deps))
    taken, made = _tensors(inputs), _tensors(outputs)
    written = {storage for _, storage in made}
    unknown = attributes.get("kernel_backend") == "triton"
    if unknown:
        written |= {storage for _, storage in taken}
    else:
        for place in _written_places(schema):
            if place < len(inputs):
                written |= {storage for _, storage in _tensors(inputs[place : place + 1])}
    return Operator(
        number=whole(node.id, 0),
        name=node.name[:MAX_NAME] if isinstance(node.name, str) else "",
        parent=parent,
        record_function=whole(attributes.get("rf_id", node.rf_id)),
        reads=tuple(sorted({storage for _, storage in taken})),
        writes=tuple(sorted(written)),
        makes=tuple(sorted({number for number, _ in made})),
        takes=tuple(sorted({number for number, _ in taken})),
        moved_bytes=sum(taken.values()) + sum(made.values()),
        thread=whole(attributes.get("tid", node.tid), 0),
        unknown_roles=unknown,
    )


def _values(value: Any) -> list[Any]:
    if isinstance(value, dict):
        value = value.get("values")
    return value if isinstance(value, list) else []


def _tensors(values: list[Any], depth: int = 0) -> dict[tuple[int, StorageKey], int]:
    """Return the bytes by tensor id and storage of `[tensor, storage, offset, elements, item size, device]`, single or
    in lists.

    A repeated tensor counts once.
    """
    sizes_bytes: dict[tuple[int, StorageKey], int] = {}
    for value in values:
        if not isinstance(value, list):
            continue
        if len(value) == 6 and isinstance(value[5], str) and all(isinstance(part, int) for part in value[:5]):
            size = value[3] * value[4]
            sizes_bytes[value[0], (value[1], sys.intern(value[5]))] = size if 0 <= size <= MAX_STORAGE_BYTES else 0
        elif depth < MAX_TENSOR_DEPTH:
            sizes_bytes |= _tensors(value, depth + 1)
    return sizes_bytes


def _written_places(schema: str) -> list[int]:
    """Return the positions of the arguments that an operator's schema marks as written: `Tensor(a!) self`."""
    begin, end = schema.find("("), schema.rfind(") ->")
    if begin < 0 or end < begin or len(schema) > 10_000:
        return []
    parts: list[str] = []
    depth, last = 0, begin + 1
    for place in range(begin + 1, end):
        mark = schema[place]
        depth += mark in "(["
        depth -= mark in ")]"
        if mark == "," and depth == 0:
            parts.append(schema[last:place])
            last = place + 1
    parts.append(schema[last:end])
    arguments = [part.strip() for part in parts if part.strip() != "*"]
    return [place for place, part in enumerate(arguments) if "!" in part.split("=")[0]]
