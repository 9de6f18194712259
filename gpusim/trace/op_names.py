"""Readable names of ops: commands accept every name of an op that outputs print."""

from __future__ import annotations

from typing import Final

from gpusim.errors import OptionError, UnknownNameError
from gpusim.formats.trace import Op, Trace
from gpusim.text import short_value

#: Start of the target of an op whose operator is unknown, before the kind of its first kernel.
UNKNOWN_OP: Final = "imported."
#: Maximum number of ops named in an error.
_NAMED = 8


def op_label(op: Op) -> str:
    """Return a short readable name of an op: its layer and its operator."""
    words = op.target.split(".")
    operator = words[1] if len(words) > 1 else op.target
    return f"{op.layer or op.name} {operator}"


def full_label(op: Op) -> str:
    """Return layer, operator and name of an op: `conv1.conv convolution (convolution_3)`."""
    return f"{op_label(op)} ({op.name})"


def find_ops(trace: Trace, text: str) -> tuple[int, ...]:
    """Return the ops that `text` names: by name, number, layer and operator, full label, or a whole layer.

    A layer, with or without operator, may name several ops; ops without kernels are left out if others have
    some. Raises `UnknownNameError`.
    """
    wanted = " ".join(text.split())
    names = {op.name: index for index, op in enumerate(trace.ops)}
    if wanted in names:
        return (names[wanted],)
    # No longer than the last op number: Python refuses to parse thousands of digits.
    number = wanted.isascii() and wanted.isdigit() and len(wanted) <= len(str(len(trace.ops)))
    if number and int(wanted) < len(trace.ops):
        return (int(wanted),)
    for matches in (full_label, op_label, _layer):
        if matching := [index for index, op in enumerate(trace.ops) if matches(op) == wanted]:
            return tuple(index for index in matching if trace.ops[index].kernels) or tuple(matching)
    known = {*names, *(op_label(op) for op in trace.ops if op.layer), *(op.layer for op in trace.ops if op.layer)}
    raise UnknownNameError("op", text, known)


def find_one_op(trace: Trace, text: str) -> int:
    """Return the one op that `text` names (`find_ops`). Raises `UnknownNameError`, or `OptionError` for several."""
    ops = find_ops(trace, text)
    if len(ops) == 1:
        return ops[0]
    names = ", ".join(short_value(trace.ops[index].name) for index in ops[:_NAMED])
    more = f" and {len(ops) - _NAMED} more" if len(ops) > _NAMED else ""
    raise OptionError(f"'{short_value(text)}' names {len(ops)} ops: give one of {names}{more}")


def _layer(op: Op) -> str:
    return op.layer
