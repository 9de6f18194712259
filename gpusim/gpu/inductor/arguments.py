"""Facts on Inductor's lines: kinds without work, roles of arguments, and changes by operators."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from gpusim.formats.arguments import tensor_refs

#: Lines that do no work on the GPU.
NO_WORK: Final = frozenset(
    {
        "CommentLine",
        "EnterDeviceContextManagerLine",
        "EnterDeviceContextManagerWithStreamInfoLine",
        "ExitDeviceContextManagerLine",
        "ExitDeviceContextManagerWithStreamInfoLine",
        "FreeIfNotReusedLine",
        "FreeLine",
        "ReinterpretLine",
        "AssertSizeStrideLine",
    }
)
#: Kinds of kernels whose single line is plain text. The called function is read from the kernel, not from the text.
WRITTEN_AS_TEXT: Final = frozenset({"InplaceBernoulliFallback", "InplaceCopyFallback", "MutatingFirstArgExternKernel"})
#: Inductor's own functions that are not operators: name in the wrapper -> target of an op.
OWN_KERNELS: Final = {
    "extern_kernels.bias_addmm": "inductor.bias_addmm",
    "extern_kernels.mm_plus_mm": "inductor.mm_plus_mm",
    "extern_kernels._mm_plus_mm": "inductor.mm_plus_mm",
}


def role_of(name: str) -> str:
    """Return the role of a Triton kernel's argument of this name."""
    if name.startswith(("in_out_ptr", "ws_ptr", "sem_ptr")):
        return "rw"
    if name.startswith("in_ptr"):
        return "r"
    return "w" if name.startswith("out_ptr") else ""


def by_position(operator: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Return the call with positional arguments wherever the operator takes them so, as in a recorded call."""
    positional, rest = list(args), dict(kwargs)
    for argument in operator._schema.arguments[len(positional) :]:
        if argument.kwarg_only or argument.name not in rest:
            break
        positional.append(rest.pop(argument.name))
    return positional, rest


def written_by(operator: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[int]:
    """Return the tensors among encoded arguments that an operator changes."""
    written: list[int] = []
    for position, argument in enumerate(operator._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            written += tensor_refs([value])
    return written


def in_parts(
    target: str, args: tuple[Any, ...], results: tuple[int | None, ...]
) -> list[tuple[str, tuple[Any, ...], tuple[int | None, ...]]]:
    """Split a call into independent parts: the gradients of the input and of the weight."""
    if target != "aten.convolution_backward.default" or not (args[10][0] and (args[10][1] or args[10][2])):
        return [("", args, results)]
    data = (*args[:10], [True, False, False])
    weight = (*args[:10], [False, *args[10][1:]])
    return [("", data, (results[0], None, None)), ("_wgrad", weight, (None, *results[1:]))]
