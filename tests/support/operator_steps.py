"""Small steps around one op of each operator in the project's traces, and mutations of them.

Replay's checks before a GPU is needed look at an op's arguments, at the tensors among them, and at the ops that made
those. A mutation changes one of these and describes the change: another number, another tensor, a longer list, a moved
argument.
"""

from __future__ import annotations

import copy
import functools
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from gpusim.errors import OperatorError
from gpusim.formats.arguments import tensor_refs
from gpusim.formats.trace import Op, Tensor, TensorInit, Trace
from gpusim.gpu.replay.allowlist import allowed_operators, check_operators
from gpusim.gpu.replay.saved_facts import BACKWARDS
from gpusim.io.file_limits import MAX_STORAGE_BYTES
from gpusim.io.packed import SUFFIX, files_in
from gpusim.trace.element_sizes import DTYPE_BYTES
from gpusim.trace.store import read_trace

ROOT = Path(__file__).parents[2]
#: Other documents next to the traces.
OTHERS = (".schedules.json.gz", ".predicted.json.gz", ".perfetto.json.gz", ".plans.json.gz", ".stages.json.gz")
#: Approximate number of ops in a step: the tested one, and those behind its arguments.
MOST_OPS = 12
#: Steps per operator, with arguments of different kinds.
MOST_STEPS = 3

Document = dict[str, Any]


def trace_files() -> list[Path]:
    """Return every trace of the project whose ops are operators, also those in sets: none with code of Inductor."""
    tops = [ROOT / name for name in ("traces", "validate")]
    folders = {path.parent for top in tops for path in top.rglob("*.json.gz")}
    folders |= {path.with_suffix("") for top in tops for path in top.rglob(f"*{SUFFIX}")}
    paths = [path for folder in folders for path in files_in(folder, ".json.gz")]
    return sorted(path for path in paths if not path.name.endswith(OTHERS) and "-inductor" not in path.name)


@functools.cache
def operator_steps() -> dict[str, tuple[Trace, ...]]:
    """Return, for each operator of the project's traces, valid steps that end with one of its ops."""
    steps_of: dict[str, dict[str, Trace]] = {}
    for path in trace_files():
        trace = read_trace(path)
        maker = {tensor: index for index, op in reversed(list(enumerate(trace.ops))) for tensor in _made_by(op)}
        for index, op in enumerate(trace.ops):
            steps, kind = steps_of.setdefault(op.target, {}), _kind_of(trace, op)
            if kind in steps or len(steps) == MOST_STEPS:
                continue
            step = _behind(trace, index, maker)
            try:
                check_operators(step, op.target)
            except OperatorError:
                continue  # a rule needs an op that is further away
            steps[kind] = step
    return {target: tuple(steps.values()) for target, steps in sorted(steps_of.items())}


def _made_by(op: Op) -> Iterator[int]:
    yield from (tensor for tensor in op.outputs if tensor is not None)
    yield from op.writes


def _kind_of(trace: Trace, op: Op) -> str:
    """Return an op's arguments without their numbers."""

    def kind(value: Any) -> str:
        if isinstance(value, dict):
            tag, inner = next(iter(value.items()))
            return f"{tag}{len(trace.tensors[inner].shape)}" if tag == "tensor" else tag
        if isinstance(value, list | tuple):
            return f"[{','.join(dict.fromkeys(map(kind, value)))}]"
        return type(value).__name__

    return " ".join((*map(kind, op.args), *(f"{name}={kind(value)}" for name, value in sorted(op.kwargs.items()))))


def _behind(trace: Trace, index: int, maker: dict[int, int]) -> Trace:
    """Make a step of the op, its forward, and the ops behind their arguments, nearest first."""
    kept = [index, *_forwards_of(trace, index)]
    todo = list(kept)
    while todo and len(kept) < MOST_OPS:
        op = trace.ops[todo.pop(0)]
        for tensor in (*tensor_refs([*op.args, *op.kwargs.values()]), *op.reads):
            before = maker.get(tensor, index)
            # Another backward would need its own forward.
            if before < index and before not in kept and trace.ops[before].target not in BACKWARDS:
                kept.append(before)
                todo.append(before)
    ops = [trace.ops[op] for op in sorted(kept)]
    if not any(kernel.dur_ns for op in ops for kernel in op.kernels):  # views alone do not make a step
        timed = next(op.kernels for op in trace.ops if op.kernels and op.kernels[0].dur_ns)
        ops[-1] = msgspec.structs.replace(ops[-1], kernels=timed[:1])
    used = sorted({t for op in ops for t in (*tensor_refs([*op.args, *op.kwargs.values()]), *op.reads, *_made_by(op))})
    number = {tensor: place for place, tensor in enumerate(used)}
    there = {tensor for op in ops for tensor in _made_by(op)}
    tensors = [trace.tensors[tensor] for tensor in used]
    storages = sorted({tensor.storage for tensor in tensors})
    return msgspec.structs.replace(
        trace,
        ops=tuple(_renumbered(op, number) for op in ops),
        tensors=tuple(
            msgspec.structs.replace(
                tensor,
                storage=storages.index(tensor.storage),
                init=tensor.init if tensor.init is not None or old in there else _filled(tensor),
            )
            for old, tensor in zip(used, tensors, strict=True)
        ),
        # Room for any shape: otherwise the checks would find only the memory of a changed tensor.
        storages=tuple(msgspec.structs.replace(trace.storages[s], bytes=MAX_STORAGE_BYTES) for s in storages),
        ground_truth=None,
    )


def _forwards_of(trace: Trace, index: int) -> list[int]:
    """Return the nearest earlier op that a backward may belong to: of its forward's kind, with a common tensor."""
    rule, taken = BACKWARDS.get(trace.ops[index].target), {*tensor_refs(trace.ops[index].args)}
    for before in range(index - 1, -1, -1) if rule is not None else ():
        if trace.ops[before].target in rule.forwards and taken & {*tensor_refs(trace.ops[before].args)}:
            return [before]
    return []


def _filled(tensor: Tensor) -> TensorInit:
    return TensorInit(kind="normal", b=1.0) if "float" in tensor.dtype else TensorInit(kind="constant")


def _renumbered(op: Op, number: dict[int, int]) -> Op:
    def walk(value: Any) -> Any:
        if isinstance(value, dict):
            return {"tensor": number[value["tensor"]]} if "tensor" in value else value
        return [walk(part) for part in value] if isinstance(value, list | tuple) else value

    return msgspec.structs.replace(
        op,
        args=tuple(map(walk, op.args)),
        kwargs={name: walk(value) for name, value in op.kwargs.items()},
        outputs=tuple(None if tensor is None else number[tensor] for tensor in op.outputs),
        reads=tuple(number[tensor] for tensor in op.reads),
        writes=tuple(number[tensor] for tensor in op.writes),
        variants=(),
    )


# --- Changes ---

#: Integers at the edges of sizes, dimensions, indices and types.
INTEGERS = (0, 1, -1, 2, 3, 7, -2, -5, 64, 65, 2**31, -(2**31) - 1, 2**40, 2**53, 2**62, -(2**62), 2**63 - 1, -(2**63))
FLOATS = (0.0, -0.0, 0.5, -1.5, 1e-308, 1e-30, 1e19, 1e300, 1.7e308, -1e308)
TAGGED = (
    *({"float": word} for word in ("inf", "-inf", "nan")),
    *({"dtype": name} for name in DTYPE_BYTES),
    *({"device": name} for name in ("cuda", "cpu")),
    *({"memory_format": name} for name in ("contiguous_format", "channels_last", "channels_last_3d")),
    {"layout": "strided"},
)
WORDS = ("none", "tanh", "floor", "trunc", "sum", "mean", "amax", "add", "", "x" * 300)
NAMES = (
    "self",
    "dim",
    "size",
    "dtype",
    "device",
    "layout",
    "memory_format",
    "alpha",
    "approximate",
    "input",
    "out",
    "x",
)
SHAPES = ([], [0], [1], [2, 3], [4, 4], [1, 0, 2], [2, 3, 4, 4], [2**20, 2**20], [2**40], [3] * 8, [1] * 64)

Place = tuple[str | int, ...]


def changed_step(step: Trace, rng: random.Random) -> tuple[Document, str]:
    """Return the step as a document with 1 to 3 mutations, most of them in its last op, and their description."""
    document: Document = json.loads(msgspec.json.encode(step))
    said = [rng.choice(_CHANGES)(document, rng) for _ in range(rng.choice((1, 1, 2, 3)))]
    return document, "; ".join(said)


def _op(document: Document, rng: random.Random) -> Document:
    op: Document = document["ops"][-1] if rng.random() < 0.7 else rng.choice(document["ops"])
    for field, empty in (("args", []), ("kwargs", {}), ("outputs", []), ("reads", []), ("writes", [])):
        op.setdefault(field, copy.copy(empty))
    return op


def _places(value: Any, prefix: Place = ()) -> Iterator[Place]:
    """Yield the places of an encoded argument's independent parts, within lists and dicts."""
    if prefix:
        yield prefix
    parts = value.items() if isinstance(value, dict) and "tensor" not in value else ()
    parts = enumerate(value) if isinstance(value, list) else parts
    for key, part in parts:
        yield from _places(part, (*prefix, key))


def _get(value: Any, place: Place) -> Any:
    return functools.reduce(lambda part, key: part[key], place, value)


def _value(document: Document, rng: random.Random, depth: int = 0) -> Any:
    """Draw an encoded argument."""
    return rng.choice(
        (
            lambda: rng.choice(INTEGERS),
            lambda: rng.choice(FLOATS),
            lambda: rng.random() < 0.5,
            lambda: None,
            lambda: {"tensor": rng.randrange(len(document["tensors"]))},
            lambda: {"tensor": rng.randrange(len(document["tensors"]))},
            lambda: dict(rng.choice(TAGGED)),
            lambda: rng.choice(WORDS),
            lambda: [] if depth > 2 else [_value(document, rng, depth + 1) for _ in range(rng.randrange(5))],
            lambda: [rng.choice(INTEGERS)] * rng.choice((1, 2, 4, 8, 64)),
        )
    )()


def _like(document: Document, old: Any, rng: random.Random) -> Any:
    """Draw a value of the same kind as `old`."""
    if isinstance(old, bool):
        return not old
    if isinstance(old, int):
        return rng.choice((*INTEGERS, old + 1, old - 1, -old, old * 2, max(-(2**62), min(2**62, old**3))))
    if isinstance(old, float):
        return rng.choice((*FLOATS, -old, old * 2, *TAGGED[:3]))
    if isinstance(old, dict) and "tensor" in old:
        return {"tensor": rng.randrange(len(document["tensors"]))}
    if isinstance(old, list):
        return [_like(document, part, rng) if rng.random() < 0.5 else part for part in old]
    return dict(rng.choice(TAGGED)) if isinstance(old, dict) else _value(document, rng)


def _argument(document: Document, rng: random.Random) -> str:
    """Replace one part of the arguments by another value of its kind, or of any."""
    op = _op(document, rng)
    places = [("args", *p) for p in _places(op["args"])] + [("kwargs", *p) for p in _places(op["kwargs"])]
    if not places:
        op["args"].append(_value(document, rng))
        return "an argument where there was none"
    place = rng.choice(places)
    old = _get(op, place)
    new = _like(document, old, rng) if rng.random() < 0.6 else _value(document, rng)
    _get(op, place[:-1])[place[-1]] = new
    return f"{op['target']} {'.'.join(map(str, place))}: {json.dumps(old)[:60]} -> {json.dumps(new)[:60]}"


def _list(document: Document, rng: random.Random) -> str:
    """Change a list of arguments, or one in them: longer, shorter, in another order, deeper."""
    op = _op(document, rng)
    lists = [op["args"], *(_get(op["args"], p) for p in _places(op["args"]) if isinstance(_get(op["args"], p), list))]
    chosen = rng.choice(lists)
    at = rng.randrange(len(chosen) + 1)
    how = rng.randrange(7)
    if how == 0:
        chosen.insert(at, _value(document, rng))
    elif how == 1:
        chosen[at:] = []
    elif how == 2:
        chosen[:at] = []
    elif how == 3:
        rng.shuffle(chosen)
    elif how == 4:
        chosen[at:at] = copy.deepcopy(chosen) * rng.choice((1, 2, 13))
    elif how == 5:
        chosen[:] = [copy.deepcopy(chosen)]
    elif chosen:
        chosen[at % len(chosen)] = [chosen[at % len(chosen)]]
    return f"{op['target']}: a list of arguments changed in way {how} at {at}"


def _by_name(document: Document, rng: random.Random) -> str:
    """Pass an argument by name instead of by position, under another name, or add one."""
    op = _op(document, rng)
    name = rng.choice((*NAMES, *op["kwargs"]))
    if op["args"] and rng.random() < 0.5:
        op["kwargs"][name] = op["args"].pop(rng.randrange(len(op["args"])))
    elif op["kwargs"] and rng.random() < 0.5:
        op["kwargs"][name] = op["kwargs"].pop(rng.choice(sorted(op["kwargs"])))
    else:
        op["kwargs"][name] = _value(document, rng)
    return f"{op['target']}: argument by name {name}"


def _references(document: Document, rng: random.Random) -> str:
    """Change an op's results, reads or writes."""
    op, field = _op(document, rng), rng.choice(("outputs", "reads", "writes"))
    tensors, at = op[field], rng.randrange(len(op[field]) + 1)
    tensor = rng.choice((*range(len(document["tensors"])), *((None,) if field == "outputs" else ())))
    how = rng.randrange(4)
    if how == 0:
        tensors.insert(at, tensor)
    elif how == 1 and tensors:
        tensors[at % len(tensors)] = tensor
    elif how == 2:
        tensors[at:] = []
    else:
        tensors[:] = tensors[at:] + tensors[:at]
    return f"{op['target']}: {field} {tensors}"


def _tensor(document: Document, rng: random.Random) -> str:
    """Change a tensor that an op takes or makes: shape, strides, type, place, or initial values."""
    op = _op(document, rng)
    near = [*tensor_refs([op["args"], op["kwargs"]]), *(t for t in op["outputs"] if t is not None)]
    tensors = document["tensors"]
    number = rng.choice([t for t in near if t < len(tensors)] or range(len(tensors)))
    tensor = tensors[number]
    shape = list(tensor["shape"])
    how = rng.randrange(8)
    if how == 0 and shape:
        shape[rng.randrange(len(shape))] = rng.choice((0, 1, 2, 3, 17, 2**20, 2**40))
    elif how == 1:
        shape = list(rng.choice(SHAPES))
    elif how == 2:
        shape = shape[1:] if rng.random() < 0.5 else [*shape, rng.choice((0, 1, 2))]
    elif how == 3:
        tensor["dtype"] = rng.choice([*DTYPE_BYTES])
    elif how == 4:
        tensor["storage"] = rng.randrange(len(document["storages"]))
    elif how == 5:
        tensor["offset"] = rng.choice((0, 1, 2**20))
    elif how == 6:
        tensor["stride"] = [rng.choice((0, 1, 2, size)) for size in shape]
    else:
        tensor["init"] = rng.choice(
            (
                None,
                {"kind": "constant", "a": rng.choice(FLOATS)},
                {"kind": "integers", "a": rng.choice((0, -1, 2**40)), "b": rng.choice((0, 5, 2**62, -7))},
                {"kind": "values", "values": [rng.choice((0, 1, -1, 1e300, 0.5))] * rng.choice((0, 1, 4, 70))},
                {"kind": "normal", "a": 0.0, "b": rng.choice(FLOATS)},
            )
        )
    if shape != tensor["shape"]:
        strides = [1]
        for size in reversed(shape[1:]):
            strides.insert(0, min(2**40, strides[0] * max(1, size)))
        tensor["shape"], tensor["stride"] = shape, strides[: len(shape)]
    return f"tensor {number} of {op['target']}: {json.dumps(tensor)[:100]}"


def _target(document: Document, rng: random.Random) -> str:
    """Use another operator for the same arguments: another overload, or another name."""
    op = _op(document, rng)
    base = op["target"].rpartition(".")[0]
    alike = [name for name in sorted(allowed_operators()) if name.rpartition(".")[0].strip("_") == base.strip("_")]
    old, op["target"] = op["target"], rng.choice(alike if rng.random() < 0.4 else sorted(allowed_operators()))
    return f"{old} -> {op['target']}"


def _ops(document: Document, rng: random.Random) -> str:
    """Repeat, drop or move an op."""
    ops = document["ops"]
    how, at = rng.randrange(3), rng.randrange(len(ops))
    if how == 0:
        ops.append(copy.deepcopy(ops[at]) | {"name": "again"})
    elif how == 1 and len(ops) > 1:
        del ops[at]
    else:
        ops.insert(rng.randrange(len(ops)), ops.pop(at))
    return f"op {at} changed in way {how}"


_CHANGES: tuple[Callable[[Document, random.Random], str], ...] = (
    *(_argument,) * 5, *(_list,) * 3, _by_name, _references, *(_tensor,) * 3, _target, _ops,
)  # fmt: skip
