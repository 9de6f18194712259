"""Input buffers of a rank: cut out of the batch, gathered whole, or put together from own and received pieces."""

from __future__ import annotations

import torch

from gpusim.gpu.layerwise.transport import Transport
from gpusim.layerwise.layers import Layer
from gpusim.layerwise.pieces import EdgePieces


def from_batch(edge: EdgePieces, inputs: torch.Tensor, padding: float) -> torch.Tensor:
    """Return a rank's part of the batch, without a copy where it is in one piece."""
    part = inputs[edge.batch_box]
    if edge.is_full and part.is_contiguous():
        return part
    buffer = inputs.new_full(edge.shape, padding)
    if part.numel():
        buffer[edge.interior] = part
    return buffer


def put_together(
    edge: EdgePieces, held: torch.Tensor | None, like: torch.Tensor, transport: Transport, padding: float
) -> torch.Tensor:
    """Return a buffer of the dtype and device of `like`, filled with own and received pieces, and padding."""
    buffer = like.new_empty(edge.shape) if edge.is_full else like.new_full(edge.shape, padding)
    outgoing = [] if held is None else [(peer, held[box]) for peer, box in edge.sends]
    incoming = [(peer, buffer[box]) for peer, box in edge.receives]
    arrived = transport.begin_exchange(outgoing, incoming, edge.receive_offsets) if edge.exchanged else None
    if edge.own is not None:
        assert held is not None
        buffer[edge.own[1]] = held[edge.own[0]]
    if arrived is not None:
        arrived()
    return buffer


def gathered(part: torch.Tensor, source: Layer, place: int, transport: Transport) -> torch.Tensor:
    """Return the whole of a source of which each rank has a part along one dimension."""
    whole = part.new_empty(source.output)
    transport.gather(whole, part, place)
    return whole
