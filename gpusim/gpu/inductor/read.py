"""Conversion of Inductor's lines to ops: each line is matched with its scheduler node, and with reads and writes.

A kernel's arguments show its reads and writes; the node that it was made for must agree. Unknown lines, kernels without
node and nodes without kernel are refused: nothing is guessed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from gpusim.formats.arguments import tensor_refs
from gpusim.formats.trace import KERNEL, Op, Phase
from gpusim.gpu.capture.calls import Call, Value
from gpusim.gpu.inductor import versions
from gpusim.gpu.inductor.arguments import (
    NO_WORK,
    OWN_KERNELS,
    WRITTEN_AS_TEXT,
    by_position,
    in_parts,
    role_of,
    written_by,
)
from gpusim.gpu.inductor.functional import FunctionalGraph, calls_of
from gpusim.gpu.inductor.nodes import Nodes, refused
from gpusim.gpu.inductor.places import Places
from gpusim.gpu.inductor.seam import Line, Lines, named_alike
from gpusim.gpu.replay.encode import encode
from gpusim.gpu.replay.operators import is_random
from gpusim.gpu.replay.saved_facts import NEVER_THERE

_PHASES: tuple[Phase, ...] = ("forward", "backward", "optimizer")


@dataclass(frozen=True)
class Read:
    """Contents of one graph's lines."""

    ops: list[Op]
    places: Places
    outputs: list[int]
    """Tensors that the graph returns, in its order."""
    sources: dict[str, str]
    """Hash -> text of each kernel."""
    values: dict[int, tuple[Value, ...]]
    """Tensor -> results of recorded calls with the value that it has once its buffer is written."""


def read_lines(lines: Lines, graph: FunctionalGraph, places: Places, calls: dict[str, Call]) -> Read:
    """Read a graph's lines while Inductor's graph exists. Raises `CaptureError` for a line that matches no node."""
    reader = _Reader(lines, places, calls)
    for line in lines.lines:
        reader.take(line)
    reader.nodes.check_complete()
    reader.nodes.check_order()
    return Read(reader.ops, places, reader.outputs(), reader.sources, places.values(graph.values))


@dataclass
class _Reader:
    noted: Lines
    places: Places
    calls: dict[str, Call]
    ops: list[Op] = field(default_factory=list)
    sources: dict[str, str] = field(default_factory=dict)
    _bodies: dict[str, str] = field(default_factory=dict)
    _names: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        from torch._inductor import ir
        from torch._inductor.virtualized import V

        self.ir, self.graph, self.scheduler = ir, V.graph, V.graph.scheduler
        self.nodes = Nodes(self.places)

    # --- Lines ---

    def take(self, noted: Line) -> None:
        """Convert one line."""
        line, kind = noted.line, type(noted.line).__name__
        if isinstance(line, str):
            self._take_text(line, noted)
        elif kind in NO_WORK:
            pass
        elif kind == "AllocateLine":
            if type(line.node).__name__ == "WorkspaceArg":
                self.places.add_workspace(line.node)
        elif kind == "KernelDefinitionLine":
            self._bodies[line.kernel_name] = named_alike(line.kernel_name, line.kernel_body)
        elif kind == "KernelCallLine":
            self._take_kernel(line, noted.node)
        elif kind == "ExternKernelOutLine":
            self._take_out(line.node, noted.node)
        elif kind == "ExternKernelAllocLine":
            self._take_alloc(line.node, noted.node)
        elif kind == "MultiOutputLine":
            self.nodes.match([noted.node])
        elif kind == "UnbackedSymbolDefsLine" and not line.unbacked_bindings:
            pass
        elif kind == "IndexPutFallbackLine":
            x, values = line.node.inputs[:2]
            self._take_call(line.node, noted.node, [x, list(line.indices), values, *line.node.constant_args], {})
        elif kind == "ScatterFallbackLine":
            self._take_scatter(line.node, noted.node)
        else:
            raise refused(f"a line of kind {kind}", noted.node)

    def _take_text(self, line: str, noted: Line) -> None:
        if not line.strip() or line.lstrip().startswith("#"):
            return
        if line in self.noted.zeroed:
            name = self.noted.zeroed[line]
            tensor = self.places.id_of(self.places.buffer(name))
            args = ({"tensor": tensor}, 0)
            self._add(f"zero_{name}", "aten.fill_.Scalar", args, {}, (tensor,), (), (tensor,), [noted.node])
            return
        kernel: Any = getattr(noted.node, "node", None)
        if type(kernel).__name__ in WRITTEN_AS_TEXT and not self.nodes.matched(noted.node):
            self._take_call(kernel, noted.node, [*kernel.inputs, *kernel.constant_args], dict(kernel.kwargs))
            return
        raise refused(f"the statement '{line.strip()[:80]}'", noted.node)

    def _take_kernel(self, line: Any, node: Any) -> None:
        if line.kernel_name not in self._bodies:
            raise refused(f"kernel {line.kernel_name}, which it does not define,", node)
        arguments, reads, writes = self._kernel_arguments(line, node)
        nodes = self.nodes.of_kernel(line, node)
        self.nodes.check_agree(line.kernel_name, reads, writes, nodes)
        self.nodes.match(nodes, writes)
        body = self._bodies[line.kernel_name]
        source = hashlib.sha256(body.encode()).hexdigest()
        self.sources[source] = body
        read_ids, write_ids = (
            tuple(dict.fromkeys(self.places.id_of(self.places.buffer(name)) for name in names))
            for names in (reads, writes)
        )
        self._add(line.kernel_name, KERNEL, arguments, {}, (), read_ids, write_ids, nodes, source)

    def _kernel_arguments(self, line: Any, node: Any) -> tuple[tuple[Any, ...], list[str], list[str]]:
        """Return a kernel's encoded arguments, and the names of the buffers that it reads and writes."""
        roles = self._roles(line, node)
        encoded: list[Any] = []
        reads: list[str] = []
        writes: list[str] = []
        for argument, role in zip(line.call_args, roles, strict=True):
            name = str(argument)
            if self.places.is_buffer(name):
                if not role:
                    raise refused(f"argument {name} of kernel {line.kernel_name}, read or written", node)
                real = self.places.real_name(name)
                if "r" in role:
                    reads.append(real)
                if "w" in role:
                    writes.append(real)
                encoded.append({"tensor": self.places.id_of(self.places.buffer(name))})
            else:
                encoded.append(self._number(argument, line, node))
        return tuple(encoded), list(dict.fromkeys(reads)), list(dict.fromkeys(writes))

    def _roles(self, line: Any, node: Any) -> list[str]:
        """Return the role of each kernel argument: `r`, `w`, `rw`, or "" for a number."""
        if not line.triton:
            kinds = line.arg_types or []
            roles = ["r" if str(kind).startswith("const ") else "w" if "*" in str(kind) else "" for kind in kinds]
        else:
            names = versions.signature_of(line)
            if names is None:
                raise refused(f"kernel {line.kernel_name} without a signature", node)
            roles = [role_of(name) for name in names]
        if len(roles) != len(line.call_args):
            problem = f"kernel {line.kernel_name} with {len(line.call_args)} arguments, {len(roles)} in its signature,"
            raise refused(problem, node)
        return roles

    def _number(self, argument: Any, line: Any, node: Any) -> Any:
        text = str(argument)
        if text == "None":
            return None
        for kind in (int, float):
            try:
                return kind(text)
            except ValueError:
                continue
        raise refused(f"argument '{text[:80]}' of kernel {line.kernel_name}", node)

    # --- Kernels outside Inductor ---

    def _take_out(self, kernel: Any, node: Any) -> None:
        """Convert a call that writes into existing memory."""
        out = kernel.output_view if kernel.output_view is not None else kernel
        operator = kernel.op_overload
        if not isinstance(operator, torch._ops.OpOverload):
            target = OWN_KERNELS.get(kernel.get_kernel_name())
            if target is None:
                raise refused(f"a call of {kernel.get_kernel_name()}", node)
            self._take_call(kernel, node, [*kernel.inputs, *kernel.constant_args], dict(kernel.kwargs), out, target)
            return
        self._take_call(kernel, node, [*kernel.inputs, *kernel.constant_args], dict(kernel.kwargs), out)

    def _take_alloc(self, kernel: Any, node: Any) -> None:
        """Convert a call that returns new tensors."""
        if isinstance(kernel, self.ir.FallbackKernel):
            args, kwargs = kernel.unflatten_args(kernel.inputs, kernel.constant_args)
            self._take_call(kernel, node, list(args), {**kernel.kwargs, **kwargs})
        else:
            self._take_call(kernel, node, [*kernel.inputs, *kernel.constant_args], dict(kernel.kwargs))

    def _take_scatter(self, kernel: Any, node: Any) -> None:
        if kernel.src_is_tensor:
            x, index, src = kernel.inputs
        else:
            x, index = kernel.inputs
            src = kernel.constant_args[1]
        kwargs = {} if kernel.kwargs["reduce"] is None else {"reduce": kernel.kwargs["reduce"]}
        args = [x, kernel.constant_args[0], index, src]
        if str(kernel.op_overload).startswith("aten.scatter_reduce"):
            args.append(kwargs.pop("reduce"))
            kwargs["include_self"] = kernel.kwargs["include_self"]
        self._take_call(kernel, node, args, kwargs)

    def _take_call(
        self, kernel: Any, node: Any, args: list[Any], kwargs: dict[str, Any], out: Any = None, target: str = ""
    ) -> None:
        """Convert a call of an operator, or of one of Inductor's own functions under `target`."""
        operator = kernel.op_overload
        if type(kernel).__name__ == "InplaceCopyFallback":
            operator = torch.ops.aten.copy_.default
        if not target and not isinstance(operator, torch._ops.OpOverload):
            raise refused(f"a call of {kernel.get_kernel_name()}", node)
        results = () if out is not None else self._results(kernel)
        if not target:
            args, kwargs = by_position(operator, args, kwargs)
        encoded = tuple(self._encode(value, node) for value in args)
        by_name = {name: self._encode(value, node) for name, value in kwargs.items()}
        read = list(dict.fromkeys(tensor_refs([*encoded, *by_name.values()])))
        written: list[int] = []
        if out is not None:
            written = [self.places.id_of(self.places.of(out))]
            by_name["out"] = {"tensor": written[0]}
            results = (written[0],)
        elif not target:
            written = written_by(operator, encoded, by_name)
        fresh = [index for index in results if index is not None and index not in written]
        aliases = self._is_view(kernel)
        writes = tuple(dict.fromkeys([*written, *([] if aliases else fresh)]))
        self.nodes.match([node], self.nodes.names_written(node))
        name = (target or str(operator)).split(".")[1]
        random = not target and is_random(operator)
        for part, part_args, part_made in in_parts(target or str(operator), encoded, results):
            part_writes = tuple(w for w in writes if w in written or w in part_made)
            reads = tuple(read) if part_writes else ()
            self._add(name + part, target or str(operator), part_args, by_name, part_made, reads, part_writes, [node],
                      random=random)  # fmt: skip

    def _results(self, kernel: Any) -> tuple[int | None, ...]:
        """Return the tensors that a call returns, at the places of `placed_results`; None where the step has none."""
        layout = kernel.layout
        if isinstance(layout, self.ir.NoneLayout):
            return tuple(None for _ in kernel.op_overload._schema.returns)
        if not isinstance(kernel, self.ir.FallbackKernel):
            return (self.places.id_of(self.places.buffer(kernel.get_name())),)
        flat: list[int | None] = []

        def walk(part: Any) -> None:
            if isinstance(part, list | tuple):
                for inner in part:
                    walk(inner)
            elif isinstance(part, self.ir.MultiOutput):
                name = part.get_name()
                live = name in self.scheduler.name_to_buf and name not in self.graph.removed_buffers
                flat.append(self.places.id_of(self.places.buffer(name)) if live else None)
            else:
                flat.append(None)  # a number, or absent: here, or only where torch has no memory

        never = NEVER_THERE.get(str(kernel.op_overload), ())
        walk([part for place, part in enumerate(kernel.outputs) if place not in never])
        return tuple(flat)

    def _is_view(self, kernel: Any) -> bool:
        return bool(kernel.get_inputs_that_alias_output())

    def _encode(self, value: Any, node: Any) -> Any:
        """Encode an argument of a call as plain JSON."""
        if isinstance(value, list | tuple):
            return [self._encode(part, node) for part in value]
        if isinstance(value, self.ir.NoneAsConstantBuffer):
            return None
        if isinstance(value, self.ir.IRNode):
            return {"tensor": self.places.id_of(self.places.of(value))}
        if hasattr(value, "free_symbols"):  # a sympy expression
            if value.free_symbols:
                raise refused(f"a size that is not fixed ({value})", node)
            value = int(value) if value.is_integer else float(value)
        return encode(value, lambda _: -1, self.places.device)

    def outputs(self) -> list[int]:
        """Return the tensors that the graph returns."""
        ids = []
        for output in self.graph.graph_outputs:
            if not isinstance(output, self.ir.IRNode) or isinstance(output, self.ir.NoneAsConstantBuffer):
                raise refused("an output that is no tensor", None)
            ids.append(self.places.id_of(self.places.of(output)))
        return ids

    # --- Ops ---

    def _add(
        self,
        name: str,
        target: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        outputs: tuple[int | None, ...],
        reads: tuple[int, ...],
        writes: tuple[int, ...],
        nodes: Sequence[Any],
        source: str = "",
        random: bool = False,
    ) -> None:
        phase, layer = self._origin(nodes)
        self.ops.append(
            Op(
                name=self._unique(name),
                target=target,
                args=args,
                kwargs=kwargs,
                outputs=outputs,
                reads=reads,
                writes=writes,
                random=random,
                phase=phase,
                layer=layer,
                source=source,
            )
        )

    def _unique(self, name: str) -> str:
        count = self._names.get(name, 0)
        self._names[name] = count + 1
        return f"{name}_{count}" if count else name

    def _origin(self, nodes: Sequence[Any]) -> tuple[Phase, str]:
        """Return phase and layer of a line's computation: those of its last call."""
        names = []
        for node in nodes:
            for part in node.get_nodes() if node is not None else ():
                origins = part.node.get_origins() if part.node is not None else ()
                names += [calls_of(origin) for origin in origins]
        calls = [self.calls[name] for name in names if name in self.calls]
        if not calls:
            return (self.ops[-1].phase if self.ops else "forward"), ""
        phase = max((call.phase for call in calls), key=_PHASES.index)
        layers = [call.layer for call in calls if call.phase == phase and call.layer]
        return phase, layers[-1] if layers else ""
