"""Checks of operands that operators trust: a forward's saved tensors, and looked-up numbers. Needs no torch.

A backward takes the places of maxima, means and sums of exponentials that its forward saved without checking them:
wrong ones make it read or write beyond a tensor. In a captured step they are unchanged results of the forward; so they
must be here. Shapes are those that the trace declares; replay checks results against them
(`gpusim.gpu.replay.execute`), except for those that depend on a library's version (`VARYING`). Rules on sizes alone are
in `gpusim.gpu.replay.size_rules`.
"""

from __future__ import annotations

from collections.abc import Iterable

from gpusim.formats.arguments import TENSOR, tensor_refs
from gpusim.formats.trace import Op, Trace
from gpusim.gpu.replay.known_values import KnownValues, is_row
from gpusim.gpu.replay.saved_facts import (
    BACKWARDS,
    BAG,
    BOX_FORWARDS,
    BOX_IMAGES,
    DEFAULTS,
    FUSED_LISTS,
    NULL_ARGUMENTS,
    SAVES_IF,
    SEQUENCE_LENGTHS,
    UNDECLARED_WRITES,
    UNSAVED,
    VARYING,
    VIEWS,
    WEIGHT_ROWS,
    Backward,
)
from gpusim.gpu.replay.size_rules import (
    fused_step_problem,
    is_dense,
    lists_problem,
    size_problem,
    tensor_at,
    tensor_of,
)


class SavedRules:
    """The rules applied to one trace, whose references are in range and whose operators are allowed."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self._forwards: dict[tuple[str, ...], int] = {}
        """Last call so far of each forward that saves nothing, by the arguments shared with its backward."""
        self._made: dict[int, tuple[int, int]] = {}
        """Tensor -> the op that first returns it, and the position there."""
        self._again: set[int] = set()
        """Tensors that exist before an op returns them: changed in place, or viewed once more."""
        self._written: dict[int, list[int]] = {}
        varying: dict[int, str] = {}
        for index, op in enumerate(trace.ops):
            for place, tensor in enumerate(op.outputs):
                if tensor is not None:
                    if tensor in self._made or trace.tensors[tensor].init is not None:
                        self._again.add(tensor)
                    self._made.setdefault(tensor, (index, place))
                    if place in VARYING.get(op.target, ()):
                        varying[trace.tensors[tensor].storage] = op.target
            for storage in {trace.tensors[tensor].storage for tensor in op.writes}:
                self._written.setdefault(storage, []).append(index)
        self._varying = varying
        self.known = KnownValues(trace, self._made, self._again, self._written)

    def problem(self, index: int) -> str:
        """Return the reason to refuse op `index`, or "". Call it for all ops in order."""
        op = self.trace.ops[index]
        if op.target in UNSAVED:
            self._forwards[_shared(op, UNSAVED[op.target].same.values())] = index
        return (
            self._undeclared_writes(op)
            or self._returned_again(index, op)
            or self._taken_as_saved(op)
            or self._backward(index, op)
            or size_problem(self.trace, op)
            or self._places(op)
            or fused_step_problem(self.trace, index, op)
            or (lists_problem(self.trace, op) if op.target.split(".")[1] in FUSED_LISTS else "")
        )

    def _undeclared_writes(self, op: Op) -> str:
        """Refuse undeclared writes: changes that an operator's schema omits must be in `writes`."""
        positions, flag = UNDECLARED_WRITES.get(op.target.rpartition(".")[0], ((), None))
        if flag is not None and len(op.args) > flag and op.args[flag] is False:
            return ""
        changed = {tensor for place in positions if place < len(op.args) for tensor in tensor_refs(op.args[place])}
        return "it changes its statistics, which its 'writes' do not list" if changed - {*op.writes} else ""

    def _returned_again(self, index: int, op: Op) -> str:
        """Refuse an op that returns an existing tensor, unless `writes` declares a change or the op makes views."""
        for tensor in op.outputs:
            if tensor is None or tensor not in self._again or tensor in op.writes or op.target in VIEWS:
                continue
            if self.trace.tensors[tensor].init is not None or self._made[tensor][0] < index:
                return f"it returns tensor {tensor}, which exists already, and its 'writes' do not list it"
        return ""

    def _taken_as_saved(self, op: Op) -> str:
        """Refuse other users of a result that only the backward may take, because its size varies."""
        rule = BACKWARDS.get(op.target)
        for place, value in enumerate((*op.args, *op.kwargs.values())):
            if rule is not None and place < len(op.args) and place in rule.saved:
                continue
            for tensor in tensor_refs(value):
                target = self._varying.get(self.trace.tensors[tensor].storage)
                if target is not None:
                    return f"tensor {tensor} is for the backward of '{target}' alone"
        return ""

    def _backward(self, index: int, op: Op) -> str:
        """Check that a backward takes what its forward saved."""
        rule = BACKWARDS.get(op.target)
        if rule is None:
            return ""
        if any(place >= len(op.args) for place in (*rule.saved, *rule.same)):
            return "it lacks arguments"
        forward = self._forward_of(index, op, rule)
        if forward is None:
            return f"its saved tensors are not those of a '{rule.forwards[0]}' before it"
        saver = self.trace.ops[forward]
        for place, saved in rule.saved.items():
            wanted = saver.outputs[saved] if saved < len(saver.outputs) else None
            if op.args[place] is None and wanted is None:
                continue
            if wanted is None or op.args[place] != {TENSOR: wanted}:
                return f"argument {place} is not what '{saver.name}' saved"
        for place, other in rule.same.items():
            default = DEFAULTS.get(saver.target, {}).get(other)
            if op.args[place] != (saver.args[other] if other < len(saver.args) else default):
                return f"argument {place} is not that of '{saver.name}'"
        looked_up = {1} if op.target in BOX_IMAGES else {place for place in rule.same if self._counts(op, place)}
        for place in (*rule.saved, *looked_up):
            tensor = tensor_at(self.trace, op, place)
            if tensor is None:
                continue
            # A schedule may move an op that changes it here, unless only the forward does.
            if op.args[place][TENSOR] in self._again:
                return f"argument {place} is made more than once"
            if max(self._written.get(tensor.storage, [0])[-1:]) > forward:
                return f"argument {place} has changed since '{saver.name}', or changes later"
            if op.args[place][TENSOR] not in op.reads or (place in rule.same and not self._read_by(saver, op, place)):
                return f"it takes argument {place}, which its 'reads' or those of '{saver.name}' do not list"
        return self._shapes_of_backward(op, saver, rule)

    def _forward_of(self, index: int, op: Op, rule: Backward) -> int | None:
        """Return the op that saved a backward's operands; for an embedding, which saves nothing, the last on its
        indices.
        """
        for place in rule.saved:
            value = op.args[place]
            if isinstance(value, dict) and TENSOR in value:
                forward, _ = self._made.get(value[TENSOR], (index, 0))
                return forward if forward < index and self.trace.ops[forward].target in rule.forwards else None
        return None if rule.saved else self._forwards.get((rule.forwards[0], *_shared(op, rule.same)[1:]))

    def _read_by(self, saver: Op, op: Op, place: int) -> bool:
        """Whether a forward declares reading the argument that its backward also takes."""
        return op.args[place][TENSOR] in saver.reads

    def _counts(self, op: Op, place: int) -> bool:
        """Whether an argument has integers: places or classes."""
        tensor = tensor_at(self.trace, op, place)
        return tensor is not None and "int" in tensor.dtype

    def _shapes_of_backward(self, op: Op, saver: Op, rule: Backward) -> str:
        flag = SAVES_IF.get(saver.target)
        if flag is not None and (len(saver.args) <= flag or saver.args[flag] is not True):
            return f"'{saver.name}' saves nothing for it"
        result = saver.outputs[0] if saver.outputs else None
        grad = None if rule.grad is None else tensor_at(self.trace, op, rule.grad)
        if grad is not None and (result is None or grad.shape != self.trace.tensors[result].shape):
            return f"the gradient has another shape than the result of '{saver.name}'"
        for place, of in SEQUENCE_LENGTHS.get(op.target, {}).items():
            query = tensor_at(self.trace, op, of)
            if query is None or len(query.shape) != 4 or op.args[place] != query.shape[2]:
                return f"argument {place} is not the length of its sequence"
        if any(op.args[place] is not None for place in NULL_ARGUMENTS.get(op.target, ())):
            return "packed sequences are not supported"
        if op.target in WEIGHT_ROWS:
            place, of = WEIGHT_ROWS[op.target]
            weight = tensor_at(self.trace, saver, of)
            if weight is None or tuple(op.args[place : place + 1]) != weight.shape[:1]:
                return f"it has another number of rows than the weight of '{saver.name}'"
        if op.target in BOX_IMAGES:
            first, images = BOX_IMAGES[op.target], tensor_at(self.trace, saver, 0)
            if images is None or tuple(op.args[first : first + 4]) != images.shape:
                return f"it has other sizes than the images of '{saver.name}'"
        return ""

    def _places(self, op: Op) -> str:
        """Refuse lookups without bounds check unless their rows, classes, lengths or images are known to exist."""
        if op.target in BAG:
            return self._bag(op)
        if op.target == "aten._ctc_loss.default":
            return self._labels(op)
        if op.target in BOX_FORWARDS:
            return self._boxes(op)
        return ""

    def _within(self, op: Op, place: int, count: int) -> bool:
        """Whether every number in an argument is known to be at least 0 and below `count`."""
        value = op.args[place]
        bounds = self.known.bounds(value[TENSOR]) if isinstance(value, dict) and TENSOR in value else None
        return bounds is not None and bounds[0] >= 0 and bounds[1] < count

    def _bag(self, op: Op) -> str:
        """Check that rows of an embedding bag are in its table, and that offsets rise from 0 to at most the number of
        rows.
        """
        weight, rows, offsets = (tensor_at(self.trace, op, place) for place in range(3))
        if weight is None or rows is None or offsets is None or len(weight.shape) != 2:
            return "it has no table, rows and offsets"
        if rows.dtype not in ("int32", "int64") or rows.dtype != offsets.dtype or not is_row(rows):
            return "its rows and offsets are not one-dimensional integer tensors"
        if len(op.args) > 5 and op.args[5] is not False:
            return "sparse gradients are not supported"
        each = tensor_at(self.trace, op, 6)
        if each is not None and (each.shape != rows.shape or not is_row(each) or each.dtype != weight.dtype):
            return "it does not have one weight per row"
        if not self._within(op, 1, weight.shape[0]):
            return f"nothing in the trace shows that its rows are below {weight.shape[0]}"
        ends = self.known.rising(op.args[2][TENSOR])
        if ends is None or ends[0] != 0 or ends[1] > rows.shape[0]:
            return f"nothing in the trace shows that its offsets rise from 0 to {rows.shape[0]} at most"
        return ""

    def _labels(self, op: Op) -> str:
        """Check that labels of a CTC loss are classes, and that lengths match its sequences."""
        scores, labels = tensor_at(self.trace, op, 0), tensor_at(self.trace, op, 1)
        lengths = [*op.args[2:4], (), ()][:2]
        if scores is None or labels is None or len(scores.shape) != 3 or labels.dtype not in ("int32", "int64"):
            return "it has no scores and labels"
        steps, samples, classes = scores.shape
        if any(not isinstance(each, list | tuple) or len(each) != samples for each in lengths):
            return "it does not have one length per sample"
        if any(not isinstance(n, int) or n < 0 for each in lengths for n in each) or max(lengths[0], default=0) > steps:
            return "its lengths are not those of its sequences"
        if not samples:
            return "it has no samples"
        together = labels.shape == (sum(lengths[1]),)
        apart = labels.shape[:1] == (samples,) and len(labels.shape) == 2 and max(lengths[1]) <= labels.shape[1]
        if not (together or apart) or not is_dense(labels.shape, labels.stride):
            return "its lengths are not those of its labels"
        return "" if self._within(op, 1, classes) else f"nothing in the trace shows that its labels are below {classes}"

    def _boxes(self, op: Op) -> str:
        """Check that boxes are rows of five numbers, the first an existing image: joined by `cat`, as models do."""
        images, boxes = tensor_at(self.trace, op, 0), tensor_at(self.trace, op, 1)
        if images is None or boxes is None or len(images.shape) != 4 or boxes.shape[1:] != (5,):
            return "it has no images and boxes"
        maker, _ = self._made.get(op.args[1][TENSOR], (-1, 0))
        cat = self.trace.ops[maker] if maker >= 0 and boxes.init is None else None
        numbers = cat.args[0] if cat is not None and cat.target == "aten.cat.default" and cat.args[1:] == (1,) else []
        first = tensor_of(self.trace, numbers[0]) if numbers and isinstance(numbers, list | tuple) else None
        bounds = self.known.bounds(numbers[0][TENSOR]) if first is not None and first.shape[1:] == (1,) else None
        changed = any(writer != maker for writer in self._written.get(boxes.storage, []))
        if bounds is None or changed or bounds[0] < 0 or bounds[1] >= images.shape[0]:
            return f"nothing in the trace shows that its boxes are of images below {images.shape[0]}"
        return ""


def ordered_inputs(trace: Trace) -> frozenset[int]:
    """Return the tensors from before the step whose order matters: the offsets of embedding bags."""
    bags = [op for op in trace.ops if op.target in BAG]
    known = SavedRules(trace).known if bags else None
    return frozenset(known.origin(index) for op in bags for index in tensor_refs(op.args[2]) if known is not None)


def _shared(op: Op, places: Iterable[int]) -> tuple[str, ...]:
    """Return an operator and some of its arguments, as the key that links a backward to its forward."""
    return (op.target, *(repr(op.args[place]) if place < len(op.args) else "" for place in places))
