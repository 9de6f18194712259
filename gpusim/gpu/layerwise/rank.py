"""One rank of a plan: its shares of all layers, forward and backward, and the exchanges between them.

Layers run one after the other, each with its own autograd graph. Their input buffers are filled with the rank's own and
received pieces. The backward pass, in reverse order, returns the gradients of buffers to the sources of the pieces,
which add them; meanwhile a rank computes the gradients of the layer's weights. Gradients of weights held by several
ranks are summed in buckets during the backward pass. So all ranks post the same exchanges in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from typing import Any, Literal

import numpy as np
import torch

from gpusim.defaults import DEFAULT_BATCH_NORM, DEFAULT_SEED, BatchNorm
from gpusim.gpu.layerwise.batch import Data
from gpusim.gpu.layerwise.buffers import from_batch, gathered, put_together
from gpusim.gpu.layerwise.dropout import Masks, draws_same_masks, part_of, same_masks, whole_masks
from gpusim.gpu.layerwise.gradients import gradients_of, keep
from gpusim.gpu.layerwise.laid_out import check_layer
from gpusim.gpu.layerwise.operations import (
    Parameter,
    SharedSums,
    Surroundings,
    parameter_shapes,
    run_layer,
)
from gpusim.gpu.layerwise.sharing import across_channels, sharing
from gpusim.gpu.layerwise.state import LayerState
from gpusim.gpu.layerwise.sums import GradientSums
from gpusim.gpu.layerwise.tied import TiedSums, generator_of, whole_parameters
from gpusim.gpu.layerwise.transport import Finish, Transport
from gpusim.layerwise.buckets import Bucket, gradient_buckets, sums_by_reading
from gpusim.layerwise.configs import Config, boxes
from gpusim.layerwise.costs import BUCKET_BYTES
from gpusim.layerwise.fixed_plans import Choice
from gpusim.layerwise.layers import BATCH, LayerGraph
from gpusim.layerwise.pieces import pieces

Part = Literal["forward", "backward", "transfer", "sums"]
"""What a rank does for a layer."""


class Rank:
    """All shares of one rank. `step` runs forward and backward; then `gradients` returns the gradients."""

    def __init__(
        self,
        graph: LayerGraph,
        choice: Choice,
        gpus: int,
        transport: Transport,
        *,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        seed: int = DEFAULT_SEED,
        batch_norm: BatchNorm = DEFAULT_BATCH_NORM,
        same_dropout: bool = False,
        keep_buffers: bool = False,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        """`graph` is that of the whole batch. With `same_dropout`, masks equal those of one device. With
        `keep_buffers`, buffers are made once and not filled by other ranks: for timing computation only. `bucket_bytes`
        is the least size of the buckets in which gradients are summed.

        Raises `OptionError` for an unsupported layer.
        """
        self.graph, self.choice, self.gpus, self.transport = graph, choice, gpus, transport
        self.device, self.dtype, self.batch_norm = device, dtype, batch_norm
        self._kept: dict[tuple[int, int], torch.Tensor] | None = {} if keep_buffers else None
        for layer in graph.layers:
            check_layer(layer, device)
        self.states = [self._state(index, seed, same_dropout) for index in range(len(graph))]
        self.generator = None if same_dropout else self._same_generator(seed)
        """Draws what all ranks need alike: each rank has it in the same state, and draws the same from it. None if
        nothing is drawn so.
        """
        self.users = graph.consumers()
        self.buckets = gradient_buckets(graph, choice, bucket_bytes)
        self._sums = GradientSums(transport, bucket_bytes)
        self._tied = TiedSums(graph, self.states, transport, gpus)
        self.mark: Callable[[Part, int], None] | None = None
        """Called after each part of a step with the layer that it was for."""
        self.loss = torch.zeros((), device=device, dtype=dtype)

    def _state(self, index: int, seed: int, same_dropout: bool) -> LayerState:
        layer, config, rank = self.graph.layers[index], self.choice[index], self.transport.rank
        low, high = (ends[0] for ends in boxes(layer.output, config, np.array([rank])))
        edges = []
        for number, edge in enumerate(layer.inputs):
            source = None if edge.source == BATCH else self.graph.layers[edge.source]
            source_config = Config() if source is None else self.choice[edge.source]
            edges.append(pieces(source, source_config, layer, number, config, self.gpus, rank))
        statistics, weights = sharing(layer, config, self.gpus, self.batch_norm, rank)
        channels = across_channels(config, self.gpus, rank)
        state = LayerState(layer, config, tuple(low), tuple(high), [], edges, statistics, weights, channels)
        if state.active:
            generator = generator_of(index, seed)
            first, last = int(low[1]), int(high[1])
            shapes = parameter_shapes(layer)
            if self._kept is None:
                whole = whole_parameters(self.graph, index, generator, seed, self.dtype)
                state.parameters = [
                    {k: self._leaf(of[k].part(v, first, last)) for k, v in named.items()}
                    for named, of in zip(whole, shapes, strict=True)
                ]
            else:
                state.parameters = [self._any_values(named, last - first) for named in shapes]
            pairs = [(of[k], v) for named, of in zip(state.parameters, shapes, strict=True) for k, v in named.items()]
            state.whole = [value for each, value in pairs if each.channels_at is None]
            if same_dropout:
                masks = whole_masks(layer, generator)
                state.masks = {k: part_of(mask, low, high).to(self.device, self.dtype) for k, mask in masks.items()}
        return state

    def _same_generator(self, seed: int) -> torch.Generator | None:
        layers = zip(self.graph.layers, self.choice, strict=True)
        if not any(draws_same_masks(layer, config, self.gpus) for layer, config in layers):
            return None
        return generator_of(len(self.graph), seed, self.device)  # no layer has this number

    def _any_values(self, named: dict[str, Parameter], channels: int) -> dict[str, torch.Tensor]:
        """Random parameters for this many channels, made on the device; sufficient for timing."""
        return {
            name: torch.randn(each.share(channels), device=self.device, dtype=self.dtype)
            .mul_(each.scale)
            .add_(each.mean)
            .requires_grad_(True)
            for name, each in named.items()
        }

    def _leaf(self, value: torch.Tensor) -> torch.Tensor:
        return value.clone().to(self.device).requires_grad_(True)

    def step(self, data: Data) -> torch.Tensor:
        """Run one forward and backward pass; returns the rank's part of the loss (their sum is the loss of the
        batch).
        """
        self.loss = torch.zeros((), device=self.device, dtype=self.dtype)
        for index in range(len(self.states)):
            self.forward_layer(index, data)
        if self.graph.training:
            full = {bucket.layers[-1]: bucket for bucket in self.buckets if bucket.full}
            for index in reversed(range(len(self.states))):
                self.backward_layer(index)
                self._tied.begin(index, self.loss)
                if index in full:
                    self._begin_sum(full[index])
            for bucket in self.buckets:
                if not bucket.full:
                    self._begin_sum(bucket)
            self._finish_sums()
        return self.loss

    def forward_layer(self, index: int, data: Data) -> None:
        """Fill the layer's buffers and run it."""
        state = self.states[index]
        state.buffers = [self._buffer(index, number, data) for number in range(len(state.edges))]
        self._done("transfer", index)
        state.output = state.gradient = None
        if not state.active:
            return
        state.products = []
        state.output = self.run_share(index, state.buffers, data.targets, state.products if state.late else None)
        if state.layer.kind == "loss":
            loss = state.output.detach()
            self.loss = self.loss + (loss / self.gpus if state.config.replicated else loss)
        self._done("forward", index)

    def _done(self, part: Part, index: int) -> None:
        if self.mark is not None:
            self.mark(part, index)

    def run_share(
        self,
        index: int,
        buffers: Sequence[torch.Tensor],
        targets: torch.Tensor,
        products: list[torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Run the layer's operations on filled buffers; exchanges nothing but statistics.

        `products` is given what `differentiate_inputs` needs.
        """
        state = self.states[index]
        samples = (state.low[0], state.high[0])
        shares = len(state.statistics) > 1 and state.layer.statistics > 0
        where = Surroundings(
            channels=(state.low[1], state.high[1]),
            samples=samples,
            batch=state.layer.output[0],
            shared_sum=(lambda value: SharedSums.apply(value, self._reduce(state))) if shares else None,
            targets=targets[samples[0] : samples[1]],
            masks=self._masks(state),
            rows=(state.low[2], state.high[2]),
            columns=(state.low[3], state.high[3]),
        )
        padded = state.edges[0].padded if state.edges else (False, False)
        return run_layer(state.layer, buffers, state.parameters, where, padded=padded, products=products)

    def _masks(self, state: LayerState) -> Masks:
        """Return the masks of dropout, of which ranks that all compute a layer need the same."""
        if self.generator is None or not draws_same_masks(state.layer, state.config, self.gpus):
            return state.masks
        return same_masks(state.layer, self.generator, self.dtype)

    def _reduce(self, state: LayerState) -> Any:
        return lambda tensor: self.transport.all_reduce(tensor, state.statistics)

    def _buffer(self, index: int, number: int, data: Data) -> torch.Tensor:
        """Return the buffer of one input: filled, or the existing one with `keep_buffers`."""
        state = self.states[index]
        if self._kept is None or state.edges[number].is_own:
            return self._filled(state, number, data)
        if (index, number) not in self._kept:
            self._kept[index, number] = torch.randn(state.edges[number].shape, device=self.device, dtype=self.dtype)
        return self._kept[index, number].detach().requires_grad_(self._wants_gradient(state, number))

    def _wants_gradient(self, state: LayerState, number: int) -> bool:
        """Whether the step computes the gradient of an input."""
        edge = state.layer.inputs[number]
        return self.graph.training and edge.source != BATCH and not edge.cut

    def _filled(self, state: LayerState, number: int, data: Data) -> torch.Tensor:
        """Return the buffer of one input, filled with the rank's own part, received parts and padding."""
        edge, source = state.edges[number], state.layer.inputs[number].source
        wants_gradient = self._wants_gradient(state, number)
        held = None if source == BATCH else self.states[source].output
        if edge.is_own:
            assert held is not None
            if edge.exchanged:  # by other ranks
                self.transport.begin_exchange([], [], [])()
            return held.detach().requires_grad_(wants_gradient)
        padding = -inf if any(op.kind == "pool" and not op.options["average"] for op in state.layer.ops) else 0.0
        if source == BATCH:
            return from_batch(edge, data.inputs, padding)
        part = None if held is None else held.detach()
        if edge.gathered is not None:
            assert part is not None
            buffer = gathered(part, self.graph.layers[source], edge.gathered, self.transport)
        else:
            buffer = put_together(edge, part, self.loss, self.transport, padding)
        return buffer.requires_grad_(wants_gradient)

    def backward_layer(self, index: int) -> None:
        """Run a layer's backward pass and send the gradients of its inputs back."""
        state = self.states[index]
        state.input_gradients = [None] * len(state.edges)
        of_weights: Callable[[], None] | None = None
        if state.output is not None and (state.layer.kind == "loss" or state.gradient is not None):
            gradient = torch.ones_like(state.output) if state.gradient is None else state.gradient
            if state.products:
                passed = state.output, gradient, state.buffers, state.products[0]
                state.input_gradients, of_weights = self.differentiate_inputs(index, *passed)
            else:
                state.input_gradients = self.differentiate(index, state.output, gradient, state.buffers)
        self._done("backward", index)
        given = [self._give_back(state, number) for number in reversed(range(len(state.edges)))]
        self._done("transfer", index)
        if of_weights is not None:
            of_weights()
            self._done("backward", index)
        for finish in given:
            finish()
        state.gradient, state.owns_gradient = None, False
        if self._kept is None:  # nothing later reads them
            state.buffers, state.output, state.input_gradients, state.products = [], None, [], []
        self._done("transfer", index)

    def differentiate(
        self, index: int, output: torch.Tensor, gradient: torch.Tensor, buffers: Sequence[torch.Tensor]
    ) -> list[torch.Tensor | None]:
        """Return the gradients of a layer's inputs, and keep those of its parameters."""
        parameters = [p for named in self.states[index].parameters for p in named.values()]
        of_buffers, of_parameters = gradients_of(output, gradient, buffers, parameters)
        keep(parameters, of_parameters, [gradient, *of_buffers])
        return of_buffers

    def differentiate_inputs(
        self,
        index: int,
        output: torch.Tensor,
        gradient: torch.Tensor,
        buffers: Sequence[torch.Tensor],
        product: torch.Tensor,
    ) -> tuple[list[torch.Tensor | None], Callable[[], None]]:
        """Return the gradients of a layer's inputs, and a function for those of the weights of its product.

        `product` is that of `run_share`; gradients of later parameters of the layer are kept at once.
        """
        state = self.states[index]
        weights: list[torch.Tensor] = []
        later: list[torch.Tensor] = []
        for number, named in enumerate(state.parameters):
            (weights if number == state.layer.product else later).extend(named.values())
        if product is output:
            of_buffers, of_later = gradients_of(output, gradient, buffers, later, keep_graph=True)
            of_product: torch.Tensor | None = gradient
        else:
            of_buffers, (of_product, *of_later) = gradients_of(
                output, gradient, buffers, [product, *later], keep_graph=True
            )
        shared = [gradient, of_product, *of_buffers]
        keep(later, of_later, shared)

        def of_weights() -> None:
            assert of_product is not None
            keep(weights, gradients_of(product, of_product, [], weights)[1], shared)

        return of_buffers, of_weights

    def _give_back(self, state: LayerState, number: int) -> Finish:
        """Begin to collect the gradient of one buffer: the own part and those from other ranks."""
        edge, source = state.edges[number], state.layer.inputs[number].source
        if source == BATCH or state.layer.inputs[number].cut:
            return _nothing
        if self._kept is not None and not edge.is_own:
            self._stand_in(self.states[source])
            return _nothing
        target, gradient = self.states[source], state.input_gradients[number]
        if edge.is_own:
            if gradient is not None:
                target.add(gradient)
            if edge.exchanged and not state.config.replicated:
                return self.transport.begin_exchange([], [], [])
            return _nothing
        if edge.gathered is not None and not state.config.replicated:
            assert target.output is not None
            whole = self.loss.new_zeros(edge.shape) if gradient is None else gradient
            part = torch.empty_like(target.output, memory_format=torch.contiguous_format)
            arrived = self.transport.begin_scatter(part, whole, edge.gathered)

            def add_part() -> None:
                arrived()
                target.add(part)
                target.owns_gradient = True

            return add_part
        if gradient is None and state.active:
            gradient = torch.zeros(edge.shape, device=self.device, dtype=self.dtype)
        outgoing: list[tuple[int, torch.Tensor]] = []
        incoming: list[tuple[int, torch.Tensor]] = []
        if not state.config.replicated:  # of a replicated one each rank has the whole gradient, and takes its own part
            if gradient is not None:
                outgoing = [(peer, gradient[box]) for peer, box in edge.receives]
            if target.output is not None:
                shapes = [(peer, target.output[box].shape) for peer, box in edge.sends]
                incoming = [(peer, self.loss.new_empty(shape)) for peer, shape in shapes]
        arrived = _nothing
        if edge.exchanged and not state.config.replicated:
            arrived = self.transport.begin_exchange(outgoing, incoming, edge.send_offsets)
        if target.config.replicated and not state.config.replicated:  # every rank needs what all parts give
            assert target.output is not None
            total = torch.zeros_like(target.output)
            if edge.own is not None and gradient is not None:
                total[edge.own[0]] = gradient[edge.own[1]]
            self.transport.all_reduce(total, tuple(range(self.gpus)))
            target.add(total)
            target.owns_gradient = True
        elif edge.own is not None and gradient is not None:
            target.add_part(gradient[edge.own[1]], edge.own[0], owned=False)

        def finish() -> None:
            arrived()
            for (_, box), (_, piece) in zip(edge.sends, incoming, strict=bool(incoming)):
                target.add_part(piece, box, owned=True)
            if target.output is not None and target.gradient is None:  # so that it is differentiated, as elsewhere
                target.writable_gradient()

        return finish

    def _stand_in(self, target: LayerState) -> None:
        """Use an arbitrary gradient in place of one from other ranks, for timing."""
        if target.output is not None and target.gradient is None:
            target.gradient = target.output.detach()

    def _begin_sum(self, bucket: Bucket) -> None:
        """Begin to sum the gradients of a bucket over the ranks that hold the same weights."""
        states = [self.states[index] for index in bucket.layers]
        if not states[0].active:
            return
        parameters = [
            parameter
            for index in bucket.layers
            for op, named in enumerate(self.states[index].parameters)
            for name, parameter in named.items()
            if parameter.grad is not None and not self._tied.is_apart(index, op, name)
        ]
        self._sums.begin(parameters, states[0].weights, reads=sums_by_reading(bucket, self.gpus))
        self._done("sums", bucket.layers[-1])

    def _finish_sums(self) -> None:
        """Wait for all sums."""
        self._sums.finish()
        for state in self.states:
            for parameter in state.whole:  # each part of the channels has its own share of the gradient
                if parameter.grad is not None:
                    self.transport.all_reduce(parameter.grad, state.channels)
        self._done("sums", 0)

    @property
    def parameters(self) -> list[torch.Tensor]:
        """All parameters of this rank."""
        return [p for state in self.states for named in state.parameters for p in named.values()]

    def gradients(self) -> dict[str, torch.Tensor]:
        """Gradients by layer, operation and name."""
        return {
            f"{state.layer.name}/{number}/{name}": p.grad
            for state in self.states
            for number, named in enumerate(state.parameters)
            for name, p in named.items()
            if p.grad is not None
        }

    def shares(self) -> dict[str, tuple[LayerState, Parameter]]:
        """The state of its layer and the whole parameter of each of `gradients`, by the same names."""
        return {
            f"{state.layer.name}/{number}/{name}": (state, parameter)
            for state in self.states
            for number, named in enumerate(parameter_shapes(state.layer))
            for name, parameter in named.items()
        }

    def clear(self) -> None:
        """Clear all gradients."""
        for parameter in self.parameters:
            parameter.grad = None


def _nothing() -> None:
    """Nothing is on its way."""
