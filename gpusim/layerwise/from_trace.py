"""The layer graph of a captured step.

Each forward operator is a layer, except views and followers: BatchNorm, activations and other pointwise operators that
alone read a layer's output are part of that layer, since they are split like it. Backward operators belong to the layer
whose weights or results they read, else to the last one with their module path.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import prod
from typing import Final

from gpusim.errors import OptionError, TraceError
from gpusim.formats.trace import Op, Trace
from gpusim.layerwise import op_rules as rules
from gpusim.layerwise.drafts import Draft, assign_backward, frozen_storages, tie
from gpusim.layerwise.frames import Frame, of_input
from gpusim.layerwise.image_rules import takes_channels_first
from gpusim.layerwise.layer_rules import broadcast, rule_of
from gpusim.layerwise.layers import ALL, BATCH, SAME, SCALE, Edge, Extents, Layer, LayerGraph, LayerOp, check_graph
from gpusim.layerwise.norm_rules import is_over_channels
from gpusim.layerwise.op_programs import first_program, following_program, loss_program
from gpusim.layerwise.operands import CannotRunError, Operands, is_creation, own_parameters
from gpusim.layerwise.parts import STEPS, WHOLE, moved, part_origin, part_step, scaled, spanned
from gpusim.layerwise.random_programs import with_random_splits
from gpusim.layerwise.readers import Readers, share_concatenations
from gpusim.layerwise.rule import Rule, fits, parameters_of, tensors_in
from gpusim.layerwise.view_layers import frame_of_layer, program_of_view, rule_of_view
from gpusim.layerwise.weight_regions import region_of, weight_elements
from gpusim.text import shortened, visible
from gpusim.trace.element_sizes import DTYPE_BYTES
from gpusim.units import clause

#: Most layers without a rule that a note names.
_NAMED: Final = 5
#: Errors from arguments that a captured operator does not have.
_MALFORMED: Final = (ArithmeticError, IndexError, KeyError, TypeError, ValueError)


@dataclass(frozen=True, slots=True)
class _Value:
    """The producer of a tensor (a layer, `BATCH`, or None for constants and weights) and the meaning of its
    dimensions.
    """

    layer: int | None
    frame: Frame | None
    origin: Extents | None = WHOLE
    """Its first element in the layer's output; None if it is no box of that output."""
    step: Extents = STEPS
    """Distance of its elements there."""
    cut: bool = False
    """Whether the step computes no gradient of it."""


def layers_of(trace: Trace, file: str = "") -> LayerGraph:
    """Return the layer graph of a captured step; `file` is the trace's, for messages.

    Raises `TraceError` for an imported step, which has no tensors, for one without layers, and for arguments of another
    operator.
    """
    if trace.provenance.imported_from is not None:
        kind = trace.provenance.imported_from.format
        problem = f"was imported ({kind}) and has no tensors: layers need a captured step"
        raise TraceError(file or trace.name, problem, place="$.provenance.imported_from")
    drafts = _Reader(trace, file or trace.name).drafts
    assign_backward(trace, drafts)
    frozen = frozen_storages(trace)
    weights = weight_elements([{each for each in draft.regions if each[0] not in frozen} for draft in drafts])
    fixed = weight_elements([{each for each in draft.regions if each[0] in frozen} for draft in drafts])
    for draft in drafts:
        if not draft.obstacle and any(each[0] in frozen for each in draft.regions):
            draft.obstacle = "its weights are not trained"
    tie(trace, drafts)
    layers = tuple(
        replace(
            draft.layer,
            forward=tuple(draft.forward),
            backward=tuple(draft.backward),
            weight_elements=weights[number],
            frozen_elements=fixed[number],
            ops=() if draft.obstacle else draft.layer.ops,
            obstacle=draft.obstacle,
        )
        for number, draft in enumerate(drafts)
    )
    layers = share_concatenations(layers)
    graph = LayerGraph(trace.name, trace.model.batch, layers, trace.model.mode == "train", _notes(layers))
    try:
        check_graph(graph)
    except OptionError as cause:
        raise TraceError(file or trace.name, cause.problem) from cause
    return graph


def _lasting_zeros(trace: Trace) -> set[int]:
    """Return the new tensors of zeros that no op changes."""
    zeros: set[int] = set()
    changed: set[int] = set()
    for op in trace.ops:
        if op.target == "aten.zeros.default":
            zeros.update(tensor for tensor in op.outputs if tensor is not None)
        else:
            changed.update(op.writes)
    return zeros - changed


def _reason(name: str, error: Exception) -> str:
    """Return why an operator cannot be run."""
    return str(error) if isinstance(error, CannotRunError) else f"its {name} has arguments of another operator"


@contextmanager
def _naming(index: int, op: Op, file: str) -> Iterator[None]:
    """Name the op whose arguments have no meaning. Raises `TraceError`."""
    try:
        yield
    except _MALFORMED as cause:
        problem = f"{shortened(visible(op.target))} has arguments of another operator"
        raise TraceError(file, problem, place=f"$.ops[{index}]") from cause


def _notes(layers: Sequence[Layer]) -> tuple[str, ...]:
    """Name the layers without a rule."""
    without = [layer for layer in layers if not layer.splits]
    if not without:
        return ()
    kinds = Counter(layer.kind for layer in without)
    named = ", ".join(f"{count} x {kind}" for kind, count in kinds.most_common(_NAMED))
    said = clause(len(without), "layer", "has no rule and is", "have no rule and are")
    return (f"{said} computed by every GPU: {named}",)


class _Reader:
    """A pass over the forward ops that builds the layers."""

    def __init__(self, trace: Trace, file: str) -> None:
        self.trace, self.batch = trace, trace.model.batch
        self.drafts: list[Draft] = []
        self.values: dict[int, _Value] = {}
        self.pending: list[int] = []
        self.sums: dict[int, set[int]] = {}
        """Layer of a sum of losses -> layers of these losses."""
        self.added: set[int] = set()
        """Losses that are part of another one's sum."""
        self._names: Counter[str] = Counter()
        forward = [(index, op) for index, op in enumerate(trace.ops) if op.phase == "forward"]
        channels_first = set[int]()
        for index, op in forward:
            with _naming(index, op, file):
                channels_first.update(takes_channels_first(trace, op))
        for index, tensor in enumerate(trace.tensors):
            if tensor.role in ("input", "target"):
                integers = tensor.dtype.startswith("int")
                frame = of_input(tensor.shape, self.batch, integers, index in channels_first)
                self.values[index] = _Value(BATCH, frame)
        self._readers = Readers(trace)
        self._zeros = _lasting_zeros(trace)
        for index, op in forward:
            with _naming(index, op, file):
                self._read(index, op)
        if self.drafts:
            self.drafts[-1].forward += self.pending

    def _read(self, index: int, op: Op) -> None:
        name = rules.base_name(op)
        taken = tensors_in(op.args) + tensors_in(op.kwargs)
        sources = [(t, replace(self.values[t], cut=t in op.cut)) for t in taken if t in self.values]
        from_layers = [(t, value) for t, value in sources if value.layer is not None and not is_creation(op)]
        from_layers = [] if name == "empty_like" else from_layers  # the mask of a dropout
        if name in rules.VIEWS and not op.kernels:
            self._view(index, op, name, sources)
        elif name == "clone" and self._readers.is_for_backward(op.outputs[0]):
            self._note_copy(index, sources)
        elif not from_layers:
            self.pending.append(index)  # constants, and counters of BatchNorm: with the layer that follows
            for output in op.outputs:
                if output is not None:
                    self.values[output] = _Value(None, None)
        elif (producer := self._follows(op, name, from_layers)) is not None:
            self._join(index, op, name, producer, from_layers)
        else:
            self._add(index, op, name, from_layers)

    def _note_copy(self, index: int, sources: list[tuple[int, _Value]]) -> None:
        """Note a copy of a layer's output that only the backward pass reads, as one that is changed in place."""
        owner = next((value.layer for _, value in sources), None)
        forward = self.pending if owner is None or owner == BATCH else self.drafts[owner].forward
        forward.append(index)

    def _check_gradients(self, op: Op, from_layers: list[tuple[int, _Value]]) -> None:
        """Raise `CannotRunError` for a gradient that the executor would compute in another way than the step."""
        if op.other_gradient:
            raise CannotRunError("it takes a tensor with a gradient of its own, or once with and once without one")
        if set(op.cut) - {tensor for tensor, _ in from_layers}:
            raise CannotRunError("it takes a parameter without its gradient")

    def _view(self, index: int, op: Op, name: str, sources: list[tuple[int, _Value]]) -> None:
        for output in op.outputs:
            if output is None:
                continue
            if not sources:
                self.values.setdefault(output, _Value(None, None))
                continue
            value = sources[0][1]
            frame = rules.view_frame(self.trace, op, name, value.frame, output)
            origin, step = value.origin, value.step
            if frame is not None and value.frame is not None and origin is not None:
                begin = part_origin(self.trace, op, name, value.frame, output)
                origin = None if begin is None else moved(origin, scaled(begin, step))
                step = step if begin is None else scaled(step, part_step(op, name, value.frame))
            seen = _Value(value.layer, frame, origin, step)
            if frame is None or origin is None or rules.reorders(op, name, value.frame):
                seen = self._layer_of_view(index, op, name, sources[0], output) or replace(seen, origin=None)
            self.values[output] = seen

    def _layer_of_view(self, index: int, op: Op, name: str, source: tuple[int, _Value], output: int) -> _Value | None:
        """Make a layer of a view that gives no box of a layer's output in order; None if that is not possible."""
        tensor, value = source
        if value.layer is None or value.frame is None or value.origin is None:
            return None
        frame = frame_of_layer(self.trace, op, name, value.frame, output)
        if frame is None:
            return None
        made = self._layer(op, name, [source], rule_of_view(frame), output)
        program = program_of_view(self.trace, op, name, tensor, value.frame, value.step, output, frame)
        return _Value(self._append(index, op, [source], made, frame, lambda layer: program), frame)

    def _follows(self, op: Op, name: str, from_layers: list[tuple[int, _Value]]) -> int | None:
        """Return the layer that the op is part of, or None."""
        owners = [value.layer for _, value in from_layers]
        if self._is_loss(max(layer for layer in owners if layer is not None)):
            scalar = all(not self.trace.tensors[t].shape for t in op.outputs if t is not None)
            if scalar or name in rules.LOSSES:
                return max(layer for layer in owners if layer is not None)
        is_same = rules.same_elements(self.trace, op, name)
        frame = from_layers[0][1].frame
        if any(value.cut for _, value in from_layers):
            return None
        if name in rules.BATCH_NORMS and frame is not None and not is_over_channels(frame):
            return None
        if name not in rules.POINTWISE and name not in rules.BATCH_NORMS and not is_same:
            return None
        first, value = from_layers[0]
        if value.layer is None or value.layer == BATCH or value.frame is None:
            return None
        if any(other.layer != value.layer for _, other in from_layers):
            return None
        output = next((t for t in op.outputs if t is not None), None)
        if output is None or self.trace.tensors[output].shape != self.trace.tensors[first].shape:
            return None
        in_place = first in op.writes
        if not in_place and self._readers.of(first) > 1:
            return None
        draft = self.drafts[value.layer]
        if draft.frame is None or draft.layer.kind in ("other", "concat"):  # a longer one may begin with its result
            return None
        return value.layer

    def _operands(self, index: int, op: Op, name: str, from_layers: list[tuple[int, _Value]]) -> Operands:
        """Return an operator with the boxes of layers that it takes. Raises `CannotRunError` if it takes no boxes."""
        inputs: dict[int, tuple[int, Frame]] = {}
        for number, (tensor, value) in enumerate(from_layers):
            if value.frame is None:
                raise CannotRunError(f"a view before its {name} leaves no known dimensions")
            if value.origin is None:
                raise CannotRunError(f"a view before its {name} reorders or scatters a layer's output")
            if value.frame.extents[0] != self.batch:
                raise CannotRunError(f"its {name} takes some of the samples")
            inputs.setdefault(tensor, (number, value.frame))
        steps = {tensor: value.step for tensor, value in from_layers if value.step != STEPS}
        return Operands(self.trace, op, name, index, inputs, steps, self._depends)

    def _depends(self, tensor: int) -> bool:
        return tensor in self.values and self.values[tensor].layer is not None

    def _is_all(self, value: _Value) -> bool:
        """Whether a value is all of its layer's output."""
        if value.layer is None or value.layer == BATCH:
            return False
        return value.frame is not None and value.frame.extents == self.drafts[value.layer].layer.output

    def _is_loss(self, layer: int) -> bool:
        return layer != BATCH and self.drafts[layer].layer.kind == "loss"

    def _join(self, index: int, op: Op, name: str, producer: int, from_layers: list[tuple[int, _Value]]) -> None:
        frame = from_layers[0][1].frame
        draft = self.drafts[producer]
        draft.forward += [*self.pending, index]
        self.pending = []
        draft.paths.add(op.layer)
        self._note_weights(draft, op)
        layer = draft.layer
        if name in rules.BATCH_NORMS:
            layer = replace(layer, statistics=layer.statistics + 2 * layer.output[1])
        if layer.kind == "loss":
            other = op.other_gradient or any(value.cut for _, value in from_layers)
            if other or not self._on_loss(op, name, producer, [value.layer for _, value in from_layers]):
                draft.obstacle = draft.obstacle or f"nothing runs the {name} of its loss"
            layer = draft.layer
        else:
            try:
                self._check_gradients(op, from_layers)
                if name != "clone" and not self._is_all(from_layers[0][1]):
                    raise CannotRunError(f"its {name} is for a part of it")
                if any(edge.source == producer for each in self.drafts[producer:] for edge in each.layer.inputs):
                    raise CannotRunError(f"its {name} changes it after another layer has read it")
                more = following_program(self._operands(index, op, name, from_layers), frame)
                layer = with_random_splits(replace(layer, ops=(*layer.ops, *more)))
                self._note_fixed(draft, more)
            except (CannotRunError, *_MALFORMED) as reason:
                draft.obstacle = draft.obstacle or _reason(name, reason)
        if name not in rules.LOSSES and not any(t in op.writes for t in tensors_in(op.args)[:1]):
            layer = replace(layer, kept_elements=layer.kept_elements + prod(layer.output))
        draft.layer = layer
        self._give(op, replace(from_layers[0][1], layer=producer))

    def _on_loss(self, op: Op, name: str, producer: int, owners: Sequence[int | None]) -> bool:
        """Note an operator on losses, whose sum is the executor's loss; false if unsupported."""
        if name == "add" and len(owners) == 2:
            parts = [self.sums.get(owner, {owner}) for owner in owners if owner is not None]
            self.sums[producer] = set().union(*parts)
            self.added |= self.sums[producer] - {producer}
            alone = len(self.sums[producer]) == sum(map(len, parts))
            return alone and not op.kwargs and all(map(self._is_loss, self.sums[producer]))
        program = () if name == "add" and not op.kwargs and self._adds_zero(op) else loss_program(op, name)
        if program is None or producer in self.added:
            return False
        for part in self.sums.get(producer, {producer}):
            layer = self.drafts[part].layer
            self.drafts[part].layer = replace(layer, ops=(*layer.ops, *program))
        return True

    def _adds_zero(self, op: Op) -> bool:
        """Whether an operator adds a new zero to a loss, as Python's sum does with its start."""
        others = {t for t in tensors_in(op.args) if t in self.values and self.values[t].layer is None}
        return len(op.args) == 2 and len(others) == 1 and others <= self._zeros

    def _add(self, index: int, op: Op, name: str, from_layers: list[tuple[int, _Value]]) -> None:
        output = next((t for t in op.outputs if t is not None), op.writes[0] if op.writes else None)
        shape = self.trace.tensors[output].shape if output is not None else ()
        inputs = [(tensor, value.frame) for tensor, value in from_layers]
        whole = all(value.step == STEPS for _, value in from_layers)
        ends = output is not None and self._readers.ends_as_number(output)
        rule = rule_of(self.trace, op, name, inputs, shape, self.batch, whole=whole, ends=ends)
        layer = self._layer(op, name, from_layers, rule, output)

        def program(layer: Layer) -> tuple[LayerOp, ...]:
            return first_program(self._operands(index, op, name, from_layers), layer, rule.frame)

        number = self._append(index, op, from_layers, layer, rule.frame, program)
        self._give(op, _Value(number, rule.frame))

    def _append(
        self,
        index: int,
        op: Op,
        from_layers: list[tuple[int, _Value]],
        layer: Layer,
        frame: Frame | None,
        program: Callable[[Layer], tuple[LayerOp, ...]],
    ) -> int:
        """Append a layer that begins with an operator, and return its number."""
        path = op.layer or rules.base_name(op)
        self._names[path] += 1
        count = self._names[path]
        layer = replace(layer, name=path if count == 1 else f"{path} ({count})", path=op.layer)
        draft = Draft(layer, frame)
        if layer.kind == "group_norm":  # an instance norm's weights are repeated for each sample
            for each in map(self.trace.ops.__getitem__, self.pending):
                if set(each.outputs) & set(op.reads):
                    self._note_weights(draft, each)
        try:
            self._check_gradients(op, from_layers)
            ops = program(layer)
            draft.layer = with_random_splits(replace(layer, ops=ops))
            self._note_fixed(draft, ops)
        except (CannotRunError, *_MALFORMED) as reason:
            draft.obstacle = _reason(rules.base_name(op), reason)
        mine = [] if any(index in each.forward for each in self.drafts[-len(op.outputs) :]) else [index]
        draft.forward += [*self.pending, *mine]
        self.pending = []
        draft.paths.add(op.layer)
        self._note_weights(draft, op)
        self.drafts.append(draft)
        return len(self.drafts) - 1

    def _note_weights(self, draft: Draft, op: Op) -> None:
        for tensor in op.reads:
            if self.trace.tensors[tensor].role in ("parameter", "activation"):  # or a transposed view of one
                found = parameters_of(self.trace, tensor)
                draft.weights |= found
                draft.regions |= {region_of(self.trace, tensor)} if found else set()

    def _note_fixed(self, draft: Draft, program: Sequence[LayerOp]) -> None:
        """Note the parameters of fixed tensors as the layer's."""
        for op in program:
            for _, tensor in own_parameters(op):
                draft.weights.add(tensor)
                draft.regions.add(region_of(self.trace, tensor))

    def _give(self, op: Op, given: _Value) -> None:
        """Assign the op's results to a layer, with all views of tensors that it changes."""
        before = [self.values[t] for t in op.writes if t in self.values]
        changed = {self.trace.tensors[t].storage for t in op.writes if t in self.values}
        whole = {value.layer for value in before if value.layer is not None and self._is_all(value)}
        for output in op.outputs:
            if output is not None:
                same = given.frame is not None and fits(self.trace, output, given.frame)
                self.values[output] = given if same else replace(given, frame=None)
        for tensor, value in list(self.values.items()):
            if self.trace.tensors[tensor].storage in changed and value.layer is not None and tensor not in op.outputs:
                moved_on = replace(value, layer=given.layer)
                # Where a part is changed, or a view that is a layer of its own, the place of others is not known.
                self.values[tensor] = moved_on if value.layer in whole else replace(moved_on, frame=None, origin=None)

    def _layer(self, op: Op, name: str, from_layers: list[tuple[int, _Value]], rule: Rule, output: int | None) -> Layer:
        """Return the layer that an operator with a rule begins."""
        trace = self.trace
        shape = trace.tensors[output].shape if output is not None else ()
        samples = self.batch if rule.splits == "n" else 1
        extents = rule.frame.extents if rule.frame is not None else (samples, max(1, prod(shape)), 1, 1)
        if rule.kind == "loss" and rule.frame is None:
            extents = (self.batch, 1, 1, 1)
        return Layer(
            name=name,
            kind=rule.kind,
            output=extents,
            inputs=self._edges(from_layers, rule),
            splits="".join(x for x in rule.splits if x == "n" or extents["nchw".index(x)] > 1),
            channel_unit=rule.channel_unit,
            statistics=2 * extents[1] if rule.kind == "batch_norm" else 0,
            flops=rule.flops,
            kept_elements=prod(extents),
            element_bytes=DTYPE_BYTES[trace.tensors[output].dtype] if output is not None else 4,
            input_gradient=any(value.layer != BATCH and not value.cut for _, value in from_layers),
        )

    def _edges(self, from_layers: list[tuple[int, _Value]], rule: Rule) -> tuple[Edge, ...]:
        """Return edges to the layers of the inputs; without a rule, a sample needs all of the same sample."""
        edges = []
        for number, (_, value) in enumerate(from_layers):
            assert value.layer is not None
            origin = WHOLE
            if value.layer == BATCH:
                extents = value.frame.extents if value.frame is not None else (self.batch, 1, 1, 1)
                origin = value.origin or WHOLE
            else:
                extents = self.drafts[value.layer].layer.output
                if value.frame is not None and value.origin is not None:
                    extents, origin = spanned(value.frame.extents, value.step), value.origin
            need = rule.needs[number] if number < len(rule.needs) else None
            if need is None or value.frame is None or value.frame.extents != extents:
                alike = value.frame is not None and rule.frame is not None and rule.splits == "nchw"
                need = broadcast(extents, rule.frame.extents) if alike and rule.frame is not None else None
                if need is None:
                    scaled = rule.splits and value.frame is not None
                    need = (SCALE if scaled else SAME if rule.splits else ALL, ALL, ALL, ALL)
            edges.append(Edge(value.layer, extents, need, origin, value.cut))
        return tuple(edges)
