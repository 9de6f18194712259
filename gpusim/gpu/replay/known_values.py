"""Values of a tensor that are known from a trace: bounds, and exact sequences. Needs no torch.

A few operators trust the numbers in a tensor: the rows of an embedding bag, the classes of a loss, the image of a box.
Such numbers must be known before anything runs: they come from a tensor that the trace fills and nothing changes, or
from an operator whose results follow from its arguments. Unknown values have no bounds.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

from gpusim.formats.arguments import TENSOR
from gpusim.formats.trace import Op, Tensor, Trace

Bounds = tuple[float, float]

#: Operators whose results hold only elements of the first argument; those of `_SAME_ORDER` also in its order, where
#: both are dense.
_SAME_ORDER: Final = frozenset(
    f"aten.{name}"
    for name in [
        "_to_copy.default",
        "_unsafe_view.default",
        "alias.default",
        "clone.default",
        "detach.default",
        "lift_fresh_copy.default",
        "squeeze.default",
        "squeeze.dim",
        "squeeze.dims",
        "unsqueeze.default",
        "view.default",
    ]
)
_SAME_VALUES: Final = _SAME_ORDER | {
    f"aten.{name}"
    for name in [
        "expand.default",
        "flip.default",
        "index_select.default",
        "permute.default",
        "repeat.default",
        "select.int",
        "slice.Tensor",
        "split.Tensor",
        "split_with_sizes.default",
        "t.default",
        "transpose.int",
        "unbind.int",
    ]
}
#: Operators whose result is one number everywhere: the position of the number, or None for zero.
_CONSTANT: Final[dict[str, int | None]] = {
    "aten.full.default": 1,
    "aten.full_like.default": 1,
    "aten.new_full.default": 2,
    "aten.zeros.default": None,
    "aten.zeros_like.default": None,
    "aten.new_zeros.default": None,
}
#: Range of whole numbers that each type represents exactly.
_MAX_EXACT: Final = {"int64": 2**53, "int32": 2**31 - 1, "float32": 2**24, "float64": 2**53, "float16": 2048}
#: Longest chain of operators to follow.
_MAX_STEPS: Final = 64


class KnownValues:
    """Bounds and sequences of the tensors of one trace.

    `made` gives the op that first returns a tensor, and the tensor's position there; `again` the tensors that existed
    before an op returns them; `written` the ops that declare a change of a storage, in order.
    """

    def __init__(
        self,
        trace: Trace,
        made: Mapping[int, tuple[int, int]],
        again: Collection[int],
        written: Mapping[int, Sequence[int]],
    ) -> None:
        self.trace = trace
        self._again = again
        self._rising: dict[int, Bounds | None] = {}
        self._made = made
        self._written = written
        self._bounds: dict[int, Bounds | None] = {}
        self._sequences: dict[int, Sequence[int] | None] = {}
        self._first: dict[int, int] = {}
        for index, (op, _) in made.items():
            storage = trace.tensors[index].storage
            self._first[storage] = min(op, self._first.get(storage, op))
        initial: dict[int, int] = {}
        for tensor in trace.tensors:
            if tensor.init is not None:
                initial[tensor.storage] = initial.get(tensor.storage, 0) + 1
        self._initial = initial

    def bounds(self, index: int, steps: int = _MAX_STEPS) -> Bounds | None:
        """Return the smallest and largest number that tensor `index` may hold when an op takes it; None where
        unknown.
        """
        if index not in self._bounds:
            tensor = self.trace.tensors[index]
            bounds = None
            if tensor.dtype in _MAX_EXACT and self._unchanged(index):
                op = self._maker(index)
                bounds = _bounds_of_init(tensor) if op is None else self._bounds_of_result(op, steps) if steps else None
            self._bounds[index] = _whole(bounds, _MAX_EXACT.get(tensor.dtype, 0))
        return self._bounds[index]

    def sequence(self, index: int, steps: int = _MAX_STEPS) -> Sequence[int] | None:
        """Return the whole numbers of a one-dimensional dense tensor, in order; None where unknown."""
        if index not in self._sequences:
            self._sequences[index] = self._sequence(index, steps)
        return self._sequences[index]

    def _sequence(self, index: int, steps: int) -> Sequence[int] | None:
        tensor = self.trace.tensors[index]
        if tensor.dtype not in ("int64", "int32") or not is_row(tensor) or self.bounds(index) is None:
            return None
        op = self._maker(index)
        if op is None:
            return _sequence_of_init(tensor)
        source = _tensor_of(op.args[0]) if op.args else None
        if op.target.startswith("aten.arange."):
            sequence: Sequence[int] | None = _range_of(op)
        elif op.target in _SAME_ORDER and source is not None and steps:
            sequence = self.sequence(source, steps - 1)
        elif op.target == "aten.slice.Tensor" and source is not None and steps:
            places = [*op.args[2:], None, None, None][:3]
            whole = all(place is None or isinstance(place, int) for place in places) and places[2] != 0
            before = self.sequence(source, steps - 1)
            sequence = before[slice(*places)] if whole and before is not None else None
        else:
            sequence = None
        return sequence if sequence is not None and len(sequence) == tensor.shape[0] else None

    def rising(self, index: int) -> Bounds | None:
        """Return first and last number of a tensor whose sequence is known, not empty, and never falls;
        otherwise None.
        """
        if index not in self._rising:
            numbers = self.sequence(index)
            rises = numbers and (
                (isinstance(numbers, range) and numbers.step > 0) or all(a <= b for a, b in itertools.pairwise(numbers))
            )
            self._rising[index] = (numbers[0], numbers[-1]) if numbers and rises else None
        return self._rising[index]

    def origin(self, index: int) -> int:
        """Return the tensor that tensor `index` is a view or a copy of."""
        for _ in range(_MAX_STEPS):
            op = self._maker(index)
            source = _tensor_of(op.args[0]) if op is not None and op.target in _SAME_VALUES and op.args else None
            if source is None:
                break
            index = source
        return index

    def _maker(self, index: int) -> Op | None:
        """Return the op that made a tensor; None for a tensor from before the step."""
        place = self._made.get(index)
        return None if place is None or self.trace.tensors[index].init is not None else self.trace.ops[place[0]]

    def _unchanged(self, index: int) -> bool:
        """Whether only the op or `init` that first filled a tensor's storage writes to it."""
        if index in self._again:
            return False
        storage = self.trace.tensors[index].storage
        writers = self._written.get(storage, ())
        if storage in self._initial:
            return not writers and self._initial[storage] == 1
        return all(writer == self._first.get(storage) for writer in writers[:2])

    def _bounds_of_result(self, op: Op, steps: int) -> Bounds | None:
        first: Any = op.args[0] if op.args else None
        if op.target in _CONSTANT:
            place = _CONSTANT[op.target]
            value: Any = 0 if place is None else op.args[place] if len(op.args) > place else None
            return (value, value) if _is_number(value) else None
        if op.target.startswith("aten.arange."):
            row = _range_of(op)
            return None if row is None else (float(row[0]), float(row[-1])) if row else (0.0, 0.0)
        if op.target in ("aten.cat.default", "aten.stack.default") and isinstance(first, list | tuple):
            return _union([self._bounds_of_argument(part, steps) for part in first])
        whole = self._is_whole(first) and all(isinstance(number, int) for number in op.args[1:])
        if op.target == "aten.remainder.Scalar":
            return (0, op.args[1] - 1) if whole and len(op.args) == 2 and op.args[1] > 0 else None
        if op.target == "aten.clamp.default":
            return (op.args[1], op.args[2]) if whole and len(op.args) == 3 and op.args[1] <= op.args[2] else None
        if op.target == "aten.add.Tensor" and len(op.args) == 2 and not op.kwargs:
            known = [part for part in (self._bounds_of_argument(part, steps) for part in op.args) if part is not None]
            return (known[0][0] + known[1][0], known[0][1] + known[1][1]) if len(known) == 2 else None
        return self._bounds_of_argument(first, steps) if op.target in _SAME_VALUES else None

    def _bounds_of_argument(self, value: Any, steps: int) -> Bounds | None:
        if _is_number(value):
            return (value, value)
        source = _tensor_of(value)
        return None if source is None else self.bounds(source, steps - 1)

    def _is_whole(self, value: Any) -> bool:
        source = _tensor_of(value)
        return source is not None and self.trace.tensors[source].dtype in ("int64", "int32")


def is_row(tensor: Tensor) -> bool:
    """Whether a tensor has one dimension and no gaps."""
    return len(tensor.shape) == 1 and (tensor.stride[0] == 1 or tensor.shape[0] <= 1)


def _bounds_of_init(tensor: Tensor) -> Bounds | None:
    init = tensor.init
    if init is None:
        return None
    if init.kind == "values":
        finite = bool(init.values) and all(math.isfinite(value) for value in init.values)
        return (min(init.values), max(init.values)) if finite else None
    ends = (init.a, init.a) if init.kind == "constant" else (init.a, init.b) if init.kind == "integers" else None
    return ends if ends is not None and all(math.isfinite(end) for end in ends) and ends[0] <= ends[1] else None


def _whole(bounds: Bounds | None, limit: int) -> Bounds | None:
    """Round bounds outwards to whole numbers, so that they hold after rounding, too. None beyond the limit."""
    if bounds is None or not all(math.isfinite(end) for end in bounds):
        return None
    low, high = math.floor(bounds[0]), math.ceil(bounds[1])
    return (low, high) if -limit <= low <= high <= limit else None


def _sequence_of_init(tensor: Tensor) -> Sequence[int] | None:
    init = tensor.init
    if init is None or init.kind not in ("values", "constant"):
        return None
    if init.kind == "constant":
        return range(int(init.a), int(init.a) + 1) if tensor.shape[0] == 1 else None
    return tuple(int(value) for value in init.values)


def _range_of(op: Op) -> range | None:
    """Return the rising whole numbers that `arange` makes, or None."""
    numbers = [*op.args] if len(op.args) > 1 else [0, *op.args]
    if not 2 <= len(numbers) <= 3 or any(isinstance(n, bool) or not isinstance(n, int) for n in numbers):
        return None
    return range(*numbers) if len(numbers) < 3 or numbers[2] > 0 else None


def _union(parts: Sequence[Bounds | None]) -> Bounds | None:
    known = [part for part in parts if part is not None]
    return (min(p[0] for p in known), max(p[1] for p in known)) if known and len(known) == len(parts) else None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _tensor_of(value: Any) -> int | None:
    return value[TENSOR] if isinstance(value, dict) and TENSOR in value else None
