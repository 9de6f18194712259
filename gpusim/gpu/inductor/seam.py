"""Interface to Inductor: every line that it writes into its wrapper, with the line's scheduler node.

Inductor generates Python in lines before it plans memory. Each line is an object with the nodes of its own graph
(`torch/_inductor/codegen/wrapper.py`); nothing is read from the text of the generated program.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NoReturn, TypeVar

import torch
from torch import fx

from gpusim.errors import CaptureError
from gpusim.gpu.inductor import versions
from gpusim.gpu.inductor.functional import FunctionalGraph
from gpusim.gpu.inductor.kernels import start_kernel
from gpusim.text import first_line

Result = TypeVar("Result")


@dataclass(frozen=True)
class Line:
    """A line of the wrapper, with the scheduler node whose code was being generated."""

    line: Any
    node: Any


@dataclass
class Lines:
    """Inductor's lines for one graph, in final order, before its memory plan."""

    lines: list[Line] = field(default_factory=list)
    zeroed: dict[str, str] = field(default_factory=dict)
    """Text of a line that fills a workspace with zeros -> the workspace's name."""


#: Suffix of the names of kernels in CUDA graphs. torch returns one object per text, so a kernel that a later
#: torch.compile tunes again or unloads must have another name.
OWN: Final = "_gpusim"
#: End of a Triton kernel's text within the statement that compiles it.
TEXT_ENDS: Final = "'''"


def named_alike(name: str, body: str) -> str:
    """Return the text of a kernel of ours, named without its number and style; the text still ends with the style.

    Triton caches code by the function's own text, so that kernels that two styles have in common are compiled once.
    torch goes by the whole text, so that each style has kernels of its own.
    """
    head, own, style = name.rpartition(OWN)
    stem, _, number = head.rpartition("_")
    end = body.rfind(TEXT_ENDS)
    if not own or not stem or not number.isdecimal() or name not in body or end < 0:
        return body
    return f"{body[:end]}# {own}{style}\n{body[end:]}".replace(name, f"{stem}{own}")


def without_style(text: str) -> str:
    """Return a text of `named_alike` without the line that tells styles apart."""
    return "\n".join(line for line in text.split("\n") if not line.startswith(f"# {OWN}"))


def compile_graph(
    graph: FunctionalGraph, device: str, training: bool, read: Callable[[Lines], Result], suffix: str = ""
) -> Result:
    """Compile a graph with Inductor and return the result of `read` on its lines, while Inductor's own graph exists.

    Names of kernels end with `suffix`. Inductor stops there: torch's processes compile the kernels meanwhile, as far as
    they are ready. Raises `CaptureError` where Inductor refuses the graph or a line cannot be read.
    """
    from torch._guards import TracingContext, tracing
    from torch._inductor.compile_fx import _recursive_joint_graph_passes, compile_fx_inner
    from torch._inductor.virtualized import V

    results: list[Result] = []
    refused: list[CaptureError] = []

    def finish(lines: Lines) -> NoReturn:
        try:
            results.append(read(lines))
        except CaptureError as cause:  # Inductor would wrap it
            refused.append(cause)
            raise
        raise _HasBeenReadError

    with contextlib.ExitStack() as stack:
        stack.enter_context(versions.wrapper_of(device, _wrapper_class(finish, suffix)))
        stack.enter_context(tracing(TracingContext(graph.fake_mode)))
        stack.enter_context(V.set_fake_mode(graph.fake_mode))
        stack.enter_context(torch.no_grad())
        stack.enter_context(versions.no_early_compiling())
        stack.enter_context(versions.dtype_rules_made_once())
        try:
            strides = _visible_strides(graph.module)
            _recursive_joint_graph_passes(graph.module)
            _keep_strides(graph.module, strides)
            static = tuple(range(len(graph.inputs)))
            compile_fx_inner(graph.module, graph.fake_inputs, is_inference=not training, static_input_idxs=static)
        except Exception as cause:
            if results:
                return results[0]
            if refused:
                raise refused[0] from None
            if isinstance(cause, torch.cuda.OutOfMemoryError):
                raise
            problem = first_line(cause)
            raise CaptureError(f"Inductor cannot compile this step ({problem}); use the front end 'aten'") from cause
    raise CaptureError("Inductor wrote no program for this step; use the front end 'aten'")


def _visible_strides(module: fx.GraphModule) -> dict[int, tuple[int, ...]]:
    """Return the strides of outputs that the user sees, by their place."""
    (output,) = module.graph.find_nodes(op="output")
    return {place: output.args[0][place].meta["val"].stride() for place in output.meta["user_visible_output_idxs"]}


def _keep_strides(module: fx.GraphModule, strides: Mapping[int, tuple[int, ...]]) -> None:
    """Copy outputs whose strides a pass has changed: a product padded for alignment ends with a slice of it.

    Of a slice Inductor itself keeps the order of strides only.
    """
    (output,) = module.graph.find_nodes(op="output")
    results = list(output.args[0])
    for place, stride in strides.items():
        value = results[place].meta["val"]
        if value.stride() == stride:
            continue
        with module.graph.inserting_before(output):
            copied = module.graph.call_function(torch.ops.aten.clone.default, (results[place],))
        copied.meta.update(results[place].meta, val=value.new_empty_strided(value.shape, stride))
        results[place] = copied
    output.args = (results,)
    module.recompile()


class _HasBeenReadError(Exception):
    """Exception that stops Inductor."""


def _wrapper_class(finish: Callable[[Lines], NoReturn], suffix: str) -> Any:
    """Return a wrapper class for Inductor that records its lines and calls `finish` before memory is planned."""
    from torch._inductor.codegen.wrapper import PythonWrapperCodegen
    from torch._inductor.virtualized import V

    class Wrapper(PythonWrapperCodegen):
        def __init__(self) -> None:
            self.noted = Lines()
            super().__init__()

        @staticmethod
        def create(
            is_subgraph: bool, subgraph_name: str | None, parent_wrapper: Any, partition_signatures: Any = None
        ) -> Any:
            if is_subgraph:
                raise CaptureError(f"Inductor puts '{subgraph_name}' into a graph of its own; use the front end 'aten'")
            return Wrapper()

        def writeline(self, line: Any) -> None:
            scheduler = getattr(V.graph, "scheduler", None)
            self.noted.lines.append(Line(line, getattr(scheduler, "current_node", None)))
            if type(line).__name__ == "KernelDefinitionLine":
                start_kernel(named_alike(line.kernel_name, line.kernel_body))
            super().writeline(line)

        def next_kernel_suffix(self) -> str:
            return f"{super().next_kernel_suffix()}{suffix}"

        def make_zero_buffer(self, name: str) -> str:
            line: str = super().make_zero_buffer(name)
            self.noted.zeroed[line] = name
            return line

        def register_alignment_check_inputs(self) -> None:
            """Do nothing: the runner of the kernels checks the inputs, not a line between them."""

        def generate(self, is_inference: bool) -> NoReturn:
            finish(self.noted)

    return Wrapper
