"""Memory of Inductor's buffers: storage, offset, shape and strides of each name, as in a trace."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec
import torch
from torch.utils import _pytree as pytree

from gpusim.errors import CaptureError
from gpusim.formats.trace import Role, Storage, Tensor, TensorInit
from gpusim.gpu.capture.calls import State
from gpusim.gpu.capture.record import Recorded, initial_values
from gpusim.gpu.inductor.functional import FunctionalGraph
from gpusim.gpu.replay.encode import DTYPES

Found = TypeVar("Found")


@dataclass(frozen=True)
class Place:
    """A tensor in memory."""

    storage: int
    offset_bytes: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


@dataclass
class Places:
    """Tensors and storages of a trace by the names of Inductor's buffers, while Inductor's own graph exists."""

    device: torch.device
    storages: list[Storage] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)
    constants: dict[int, torch.Tensor] = field(default_factory=dict)
    """Tensors that Inductor has computed itself, by tensor id."""
    workspaces: set[str] = field(default_factory=set)
    _named: dict[str, Place] = field(default_factory=dict)
    _ids: dict[Place, int] = field(default_factory=dict)
    _given: list[Place] = field(default_factory=list)

    @classmethod
    def of_inputs(cls, graph: FunctionalGraph, recorded: Recorded, ids: dict[str, int], device: torch.device) -> Places:
        """Start with the tensors from before the step; `ids` are their numbers in `recorded`, by name in the graph."""
        places = cls(device)
        for given in graph.inputs:  # one per storage
            indices = [ids[name] for name in given.names if name in ids]
            storage = places.new_storage(recorded.storages[recorded.tensors[indices[0]].storage].bytes)
            for index in indices:
                tensor = msgspec.structs.replace(recorded.tensors[index], storage=storage)
                dtype = DTYPES[tensor.dtype]
                place = Place(storage, tensor.offset * dtype.itemsize, tensor.shape, tensor.stride, dtype)
                places._ids[place] = len(places.tensors)
                places.tensors.append(tensor)
            offset_bytes = given.offset * given.dtype.itemsize
            places._given.append(Place(storage, offset_bytes, given.shape, given.stride, given.dtype))
        return places

    def id_of(self, place: Place) -> int:
        """Return the index of the tensor at a place; a new one is added."""
        if place not in self._ids:
            if place.offset_bytes % place.dtype.itemsize:
                raise CaptureError("a tensor begins within an element of another data type; use the front end 'aten'")
            self._ids[place] = len(self.tensors)
            self.tensors.append(_tensor(place, "activation"))
        return self._ids[place]

    def new_storage(self, size_bytes: int) -> int:
        """Return the index of a new piece of memory."""
        self.storages.append(Storage(bytes=size_bytes))
        return len(self.storages) - 1

    # --- Inductor's names ---

    def real_name(self, name: str) -> str:
        """Return the name of the memory behind a name: that of an input for its changed value."""
        from torch._inductor.virtualized import V

        return str(V.graph.scheduler.mutation_real_name.get(name, name))

    def is_buffer(self, name: str) -> bool:
        """Whether a name is a tensor's."""
        from torch._inductor.virtualized import V

        known = name in self.workspaces or name in V.graph.graph_inputs or name in V.graph.constants
        return known or V.graph.try_get_buffer(name) is not None

    def buffer(self, name: str) -> Place:
        """Return the place of the buffer of this name."""
        name = self.real_name(name)
        if name not in self._named:
            self._named[name] = self._placed(name)
        return self._named[name]

    def add_workspace(self, workspace: Any) -> None:
        """Add memory that one kernel needs for itself."""
        name = workspace.get_name()
        if name in self.workspaces:
            return
        count = int(workspace.count)
        storage = self.new_storage(count * workspace.dtype.itemsize)
        self.workspaces.add(name)
        self._named[name] = Place(storage, 0, (count,), (1,), workspace.dtype)

    def of(self, node: Any) -> Place:
        """Return the place of a node of Inductor's graph. Raises `CaptureError` for one without memory."""
        from torch._inductor import ir

        while isinstance(node, ir.MutableBox):
            node = node.data
        if isinstance(node, ir.ReinterpretView):
            base, layout = self.buffer(node.get_name()), node.get_layout()
            dtype = node.dtype
            offset = base.offset_bytes + _number(layout.offset) * base.dtype.itemsize
            if dtype.itemsize != base.dtype.itemsize:
                raise CaptureError("a view has elements of another size than its tensor; use the front end 'aten'")
            return Place(base.storage, offset, _numbers(layout.size), _numbers(layout.stride), dtype)
        if isinstance(node, ir.Buffer):
            return self.buffer(node.get_name())
        raise CaptureError(f"Inductor hands on a {type(node).__name__}, which is no tensor; use the front end 'aten'")

    def values(self, of_node: Mapping[Any, Found]) -> dict[int, Found]:
        """Return tensor -> what `of_node` has for the fx node whose value its buffer is."""
        from torch._inductor import ir
        from torch._inductor.virtualized import V

        values: dict[int, Found] = {}
        for name, place in self._named.items():
            buffer = V.graph.try_get_buffer(name)
            if isinstance(buffer, ir.Buffer) and place in self._ids:
                node = buffer.get_origin_node()
                if node in of_node:
                    values[self._ids[place]] = of_node[node]
        return values

    def _placed(self, name: str) -> Place:
        from torch._inductor import ir
        from torch._inductor.virtualized import V

        if name in V.graph.graph_inputs:
            return self._given[list(V.graph.graph_inputs).index(name)]
        if name in V.graph.constants:
            return self._constant(name, V.graph.constants[name])
        buffer = V.graph.get_buffer(name)
        layout = buffer.get_output_spec()
        if isinstance(layout, ir.NonOwningLayout):
            return self.of(layout.view)
        if isinstance(layout, ir.MutationLayoutSHOULDREMOVE):
            return self.buffer(layout.get_buffer().get_name())
        layout = buffer.get_layout()
        shape, stride = _numbers(layout.size), _numbers(layout.stride)
        aliased = sorted(set(buffer.get_inputs_that_alias_output()))
        if aliased:
            return self._alias(buffer, aliased, shape, stride, layout)
        elements = _number(V.graph.get_allocation_storage_size(buffer))
        storage = self.new_storage(elements * layout.dtype.itemsize)
        return Place(storage, _number(layout.offset) * layout.dtype.itemsize, shape, stride, layout.dtype)

    def _alias(self, buffer: Any, aliased: Sequence[str], shape: Any, stride: Any, layout: Any) -> Place:
        """Return the place of a call's result that aliases an argument's memory."""
        from torch._inductor.virtualized import V

        origins = []
        for name in aliased:
            kernel = V.graph.try_get_buffer(name)
            inner = kernel.get_inputs_that_alias_output() if kernel is not None else ()
            origins += list(inner) or [name]
        bases = {self.buffer(name) for name in origins}
        offset = self._viewed_at(buffer, shape, stride)
        if len({base.storage for base in bases}) != 1 or (offset is None and any(base.offset_bytes for base in bases)):
            raise CaptureError(
                f"Inductor's '{buffer.get_name()}' may lie in the memory of several tensors; use the front end 'aten'"
            )
        base = next(iter(bases))
        elements = _number(layout.offset) if offset is None else offset
        return Place(base.storage, elements * layout.dtype.itemsize, shape, stride, layout.dtype)

    def _viewed_at(self, buffer: Any, shape: Any, stride: Any) -> int | None:
        """Return the offset in elements of the result of an operator that Inductor does not know, None for others.

        Inductor gives 0, for a slice of complex numbers, too. So the operator is called on tensors without memory.
        """
        from torch._inductor import ir

        call = buffer.inputs[0] if isinstance(buffer, ir.MultiOutput) else buffer
        if not isinstance(call, ir.FallbackKernel):
            return None

        def bare(node: Any) -> torch.Tensor:
            place = self.of(node)
            memory = torch.empty(self.storages[place.storage].bytes // place.dtype.itemsize, dtype=place.dtype,
                                 device="meta")  # fmt: skip
            return memory.as_strided(place.shape, place.stride, place.offset_bytes // place.dtype.itemsize)

        args, kwargs = pytree.tree_map_only(ir.IRNode, bare, call.unflatten_args(call.inputs, call.constant_args))
        viewed = call.op_overload(*args, **call.kwargs, **kwargs)
        for _, part in buffer.indices if isinstance(buffer, ir.MultiOutput) else ():
            viewed = viewed[part]
        if (tuple(viewed.shape), viewed.stride()) != (shape, stride):
            raise CaptureError(
                f"Inductor lays the view '{buffer.get_name()}' over other elements; use the front end 'aten'"
            )
        return int(viewed.storage_offset())

    def _constant(self, name: str, value: torch.Tensor) -> Place:
        size = value.untyped_storage().nbytes()
        place = Place(self.new_storage(size), value.storage_offset() * value.element_size(), tuple(value.shape),
                      tuple(value.stride()), value.dtype)  # fmt: skip
        init = initial_values(value, State(name, "constant", value))
        self._ids[place] = len(self.tensors)
        self.constants[len(self.tensors)] = value
        self.tensors.append(_tensor(place, "constant", name, init))
        return place


def _tensor(place: Place, role: Role, name: str = "", init: TensorInit | None = None) -> Tensor:
    return Tensor(
        shape=place.shape,
        stride=place.stride,
        dtype=str(place.dtype).removeprefix("torch."),
        storage=place.storage,
        offset=place.offset_bytes // place.dtype.itemsize,
        role=role,
        name=name,
        init=init,
    )


def _number(value: Any) -> int:
    try:
        return int(value)
    except TypeError as cause:
        raise CaptureError(f"a size is not fixed ({value}); gpusim captures steps of fixed shape") from cause


def _numbers(values: Any) -> tuple[int, ...]:
    return tuple(_number(value) for value in values)
