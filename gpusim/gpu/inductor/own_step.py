"""A step of the user's own as Inductor's kernels, to run repeatedly on the user's own tensors.

Fused optimizer updates stay calls: one launch updates many parameters in place, which Inductor cannot do. They come
last, followed by the step's later recorded calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import prod

import msgspec
import torch
from torch.utils import _pytree as pytree

from gpusim.errors import CaptureError
from gpusim.formats.arguments import renumbered, tensor_refs
from gpusim.formats.trace import Op, Source, Storage, Tensor
from gpusim.gpu.capture.calls import Call, JointGraph, Value
from gpusim.gpu.capture.record import Recorded, live_calls, set_roles
from gpusim.gpu.inductor.functional import Traced
from gpusim.gpu.inductor.step import compiled_calls
from gpusim.gpu.inductor.styles import DEFAULT_STYLE, Noted
from gpusim.text import first_line

Shape = tuple[int, tuple[int, ...], tuple[int, ...], int, str]


def own_step(
    graph: JointGraph,
    recorded: Recorded,
    training: bool,
    style: str = DEFAULT_STYLE,
    noted: Noted | None = None,
    traced: Traced | None = None,
) -> Recorded:
    """Return the step that `recorded` has as ATen calls, with other ops between its states and results.

    Inductor's decisions are recorded in `noted`; `traced` is shared by the styles of one step. Results and states are
    in the same order; of the tensors from before the step, `initial` has Inductor's constants only. Raises
    `CaptureError` where Inductor, or gpusim, cannot compile it.
    """
    calls = live_calls(graph)
    if len(live_calls(graph, draws=True)) > len(calls):
        raise CaptureError(
            "the step draws random numbers in vain, which Inductor would leave out; use the front end 'aten'"
        )
    first, rest = split(calls)
    handed_on = _handed_on(graph, recorded, first, rest)
    part = replace(graph, calls=tuple(first), outputs=tuple(handed_on.values()), gradients=(), returned=())
    try:
        read = compiled_calls(part, recorded, training, style, apart=True, noted=noted, traced=traced)
    except (CaptureError, torch.cuda.OutOfMemoryError):
        raise
    except Exception as cause:  # torch's tracer raises errors of many kinds
        problem = first_line(cause)
        raise CaptureError(f"Inductor cannot take this step ({problem[:200]}); use the front end 'aten'") from cause
    places = read.places
    joined = _Joined(recorded, list(places.tensors), list(places.storages))
    joined.begin(read.named, {name: id_ for id_, name in recorded.named.items()})
    joined.hand_on(list(handed_on), read.outputs)
    behind = {call.name for call in rest}
    ops = [*read.ops, *(with_tensors(op, joined.tensor) for op in recorded.ops if op.name in behind)]
    outputs, gradients = ([joined.tensor(id_) for id_ in ids] for ids in (recorded.outputs, recorded.gradients))
    set_roles(joined.tensors, outputs, "output")
    set_roles(joined.tensors, gradients, "gradient")
    joined.check_apart(gradients)
    return Recorded(
        ops=with_own_names(ops),
        tensors=joined.tensors,
        storages=joined.storages,
        outputs=outputs,
        gradients=gradients,
        initial=dict(places.constants),
        final={},
        named=joined.named,
        sources=[Source(sha256=sha256, text=text) for sha256, text in read.sources.items()],
        returned=[None if id_ is None else joined.tensor(id_) for id_ in recorded.returned],
        alike=read.alike(recorded),
    )


def split(calls: Sequence[Call]) -> tuple[list[Call], list[Call]]:
    """Return the calls that Inductor compiles, and those from the first fused update on, with the counts before it."""
    begin = next((place for place, call in enumerate(calls) if _is_fused_update(call)), len(calls))
    while 0 < begin < len(calls) and _name(calls[begin - 1]) == "_foreach_add_":
        begin -= 1
    return list(calls[:begin]), list(calls[begin:])


def _is_fused_update(call: Call) -> bool:
    """Whether a call is `_fused_adam_` or alike, with the underscore of in-place operators; not `_fused_rms_norm`."""
    name = _name(call)
    return name.startswith("_fused_") and name.endswith("_")


def _name(call: Call) -> str:
    return str(call.function._schema.name).partition("::")[2]


def _handed_on(graph: JointGraph, recorded: Recorded, first: Sequence[Call], rest: Sequence[Call]) -> dict[int, Value]:
    """Return the first part's results that later calls use: id in `recorded` -> value, each once.

    Raises `CaptureError` where later calls change memory that is passed on in several parts.
    """
    compiled = {call.name for call in first}
    used = [v for call in rest for v in pytree.tree_leaves((call.args, call.kwargs)) if isinstance(v, Value)]
    used += [value for value in (*graph.outputs, *graph.gradients, *graph.returned) if value is not None]
    there = {recorded.tensors[id_].storage for id_ in recorded.named}
    handed_on: dict[int, Value] = {}
    for value in used:
        if value.node in compiled:
            id_ = recorded.results[value.node][value.index or 0]
            assert id_ is not None
            if recorded.tensors[id_].storage not in there:
                handed_on.setdefault(id_, value)
    behind = {call.name for call in rest}
    written = {recorded.tensors[t].storage for op in recorded.ops if op.name in behind for t in op.writes}
    storages = [recorded.tensors[id_].storage for id_ in handed_on]
    if any(storage in written and storages.count(storage) > 1 for storage in storages):
        raise CaptureError("the step changes several views of one result behind an update; use the front end 'aten'")
    return handed_on


@dataclass
class _Joined:
    """Tensors of Inductor's part joined with those of the recorded calls behind it."""

    recorded: Recorded
    tensors: list[Tensor]
    storages: list[Storage]
    named: dict[int, str] = field(default_factory=dict)
    _ids: dict[int, int] = field(default_factory=dict)
    """Tensor of the recorded step -> tensor here."""
    _storages: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Storage of the recorded step -> storage here, and the byte offset of its tensors there."""
    _handed: dict[int, list[int]] = field(default_factory=dict)
    """Storage of the recorded step -> its tensors that Inductor's part passes on."""
    _places: dict[Shape, int] = field(default_factory=dict)

    def begin(self, named: dict[int, str], ids: dict[str, int]) -> None:
        """Add the states that Inductor's part begins with; `ids` are their numbers in the recorded step."""
        self._places = {place_of(tensor): index for index, tensor in reversed(list(enumerate(self.tensors)))}
        for index, name in named.items():
            self.named[index] = name
            self._ids[ids[name]] = index
            self._storages[self.recorded.tensors[ids[name]].storage] = (self.tensors[index].storage, 0)

    def hand_on(self, ids: Sequence[int], made: Sequence[int]) -> None:
        """Add the results of Inductor's part. Raises `CaptureError` where they do not match the calls behind it."""
        states = {storage for storage, _ in self._storages.values()}
        for id_, index in zip(ids, made, strict=True):
            theirs, mine = self.recorded.tensors[id_], self.tensors[index]
            same = (theirs.shape, theirs.dtype) == (mine.shape, mine.dtype) and _strides(theirs) == _strides(mine)
            if not same or mine.storage in states:
                raise CaptureError("Inductor returns a result in another form; use the front end 'aten'")
            self._ids[id_] = index
            self._handed.setdefault(theirs.storage, []).append(id_)

    def tensor(self, id_: int) -> int:
        """Return the tensor here for one of the recorded step; a new one is added."""
        if id_ not in self._ids:
            theirs = self.recorded.tensors[id_]
            known = theirs.storage in self._storages or theirs.storage in self._handed
            if not known and id_ not in self.recorded.named:  # a view of a state that no kernel takes
                for base in self.recorded.named:
                    if self.recorded.tensors[base].storage == theirs.storage:
                        self.tensor(base)
            storage, later_bytes = self._storage(theirs)
            offset = theirs.offset + later_bytes // _element_bytes(theirs)
            tensor = msgspec.structs.replace(theirs, storage=storage, offset=offset)
            place = place_of(tensor)
            if place not in self._places or (id_ in self.recorded.named):
                self._places[place] = len(self.tensors)
                self.tensors.append(tensor)
            self._ids[id_] = self._places[place]
            if id_ in self.recorded.named:
                self.named[self._ids[id_]] = self.recorded.named[id_]
        return self._ids[id_]

    def _storage(self, theirs: Tensor) -> tuple[int, int]:
        """Return the storage and offset here for a tensor's memory; a new one is added."""
        handed = self._handed.get(theirs.storage, [])
        if handed:
            base = self.recorded.tensors[handed[0]]
            if len(handed) > 1 or _extent(base) != _extent(theirs) or base.dtype != theirs.dtype:
                raise CaptureError("the step uses another view of a result behind an update; use the front end 'aten'")
            mine = self.tensors[self._ids[handed[0]]]
            return mine.storage, (mine.offset - base.offset) * _element_bytes(base)
        if theirs.storage not in self._storages:
            self.storages.append(self.recorded.storages[theirs.storage])
            self._storages[theirs.storage] = (len(self.storages) - 1, 0)
        return self._storages[theirs.storage]

    def check_apart(self, gradients: Sequence[int]) -> None:
        """Raise `CaptureError` where two gradients share memory: the user changes each of them in place."""
        theirs = {self.recorded.tensors[id_].storage for id_ in self.recorded.gradients}
        if len({self.tensors[index].storage for index in gradients}) < len(theirs):
            raise CaptureError("Inductor returns two gradients in one memory; use the front end 'aten'")


def with_tensors(op: Op, tensor: Callable[[int], int]) -> Op:
    """Return an op with its tensors numbered anew; `tensor` is called once for each, in ascending order."""
    numbers = {*tensor_refs([*op.args, *op.kwargs.values()]), *op.reads, *op.writes}
    numbers |= {number for number in op.outputs if number is not None}
    anew = {number: tensor(number) for number in sorted(numbers)}
    return msgspec.structs.replace(
        op,
        args=tuple(renumbered(value, anew) for value in op.args),
        kwargs={key: renumbered(value, anew) for key, value in op.kwargs.items()},
        outputs=tuple(None if number is None else anew[number] for number in op.outputs),
        reads=tuple(dict.fromkeys(anew[number] for number in op.reads)),
        writes=tuple(dict.fromkeys(anew[number] for number in op.writes)),
    )


def place_of(tensor: Tensor) -> Shape:
    return tensor.storage, tensor.shape, tensor.stride, tensor.offset, tensor.dtype


def _strides(tensor: Tensor) -> list[int]:
    """Return the strides of the dimensions in which a tensor has several elements."""
    return (
        [step for size, step in zip(tensor.shape, tensor.stride, strict=True) if size > 1] if prod(tensor.shape) else []
    )


def _extent(tensor: Tensor) -> tuple[int, int]:
    """Return the first and last element of a tensor in its storage."""
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride, strict=True))
    return tensor.offset, tensor.offset + last


def _element_bytes(tensor: Tensor) -> int:
    return int(getattr(torch, tensor.dtype).itemsize)


def with_own_names(ops: Sequence[Op]) -> list[Op]:
    """Give each op a unique name."""
    seen: dict[str, int] = {}
    named = []
    for op in ops:
        count = seen.get(op.name, 0)
        seen[op.name] = count + 1
        named.append(msgspec.structs.replace(op, name=f"{op.name}_again{count}") if count else op)
    return named
