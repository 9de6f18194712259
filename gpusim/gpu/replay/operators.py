"""torch's operators: lookup by name, and the arguments that a call changes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from gpusim.errors import OperatorError
from gpusim.formats.arguments import tensor_refs
from gpusim.formats.trace import Op, Trace
from gpusim.gpu.replay.allowlist import allowed_operators, base_name, not_listed
from gpusim.gpu.replay.saved_facts import UNDECLARED_WRITES


@functools.cache
def resolve(target: str, own: bool = False) -> torch._ops.OpOverload:
    """Return the overload of an allowed operator, or of any operator for the user's `own` step.

    No other attribute of torch can be reached through a name. Raises `OperatorError` for one that is not allowed or not
    in this torch.
    """
    if not own and target not in allowed_operators():
        raise OperatorError(not_listed(target))
    namespace, name, overload = target.split(".")
    if namespace == "torchvision":
        try:
            import torchvision  # noqa: F401  (registers its operators)
        except ImportError as cause:
            raise OperatorError(f"operator '{target}' needs torchvision, which is not installed") from cause
    packet = getattr(getattr(torch.ops, namespace), name, None)
    if isinstance(packet, torch._ops.OpOverloadPacket) and overload in packet.overloads():
        operator = getattr(packet, overload)
        if isinstance(operator, torch._ops.OpOverload):
            return operator
    raise OperatorError(f"torch {torch.__version__} has no operator '{target}'")


def check_schemas(trace: Trace) -> None:
    """Check each op against its operator's schema: number, names and types of arguments, and declared changes.

    Raises `OperatorError` with trace, place and operator.
    """
    for index, op in enumerate(trace.ops):
        problem = _problem_with_schema(op, resolve(op.target)._schema)
        if problem:
            raise OperatorError(f"{trace.name}: $.ops[{index}]: operator '{op.target}' is refused: {problem}")


def _problem_with_schema(op: Op, schema: Any) -> str:
    positional = [argument for argument in schema.arguments if not argument.kwarg_only]
    by_name = {argument.name: argument for argument in schema.arguments if argument.kwarg_only}
    if len(op.args) > len(positional):
        return f"it takes {len(positional)} arguments, the trace has {len(op.args)}"
    unknown = next((name for name in op.kwargs if name not in by_name), None)
    if unknown is not None:
        return f"it takes no argument '{unknown[:80]}' by name"
    given = [*zip(positional, op.args, strict=False), *((by_name[name], value) for name, value in op.kwargs.items())]
    for argument, value in given:
        if not _fits(value, argument.real_type):
            return f"argument '{argument.name}' is not a {argument.real_type}"
        if argument.alias_info is not None and argument.alias_info.is_write and set(tensor_refs(value)) - {*op.writes}:
            return f"it changes argument '{argument.name}', which its 'writes' do not list"
    return ""


def _is_number(value: Any) -> bool:
    return isinstance(value, bool | int | float) or _is_tagged(value, "float")


#: Check of each argument kind in a trace. A tensor may be null, since torch passes undefined ones on, or a number,
#: which torch takes for a tensor in sums and products and refuses elsewhere.
_KINDS: dict[str, Callable[[Any], bool]] = {
    "Tensor": lambda value: value is None or _is_tagged(value, "tensor") or _is_number(value),
    "number": _is_number,
    "int": lambda value: isinstance(value, int) and not isinstance(value, bool),
    "SymInt": lambda value: isinstance(value, int) and not isinstance(value, bool),
    "float": lambda value: (
        (isinstance(value, int | float) and not isinstance(value, bool)) or _is_tagged(value, "float")
    ),
    "bool": lambda value: isinstance(value, bool),
    "str": lambda value: isinstance(value, str),
    "Device": lambda value: _is_tagged(value, "device"),
    "ScalarType": lambda value: _is_tagged(value, "dtype"),
    "Layout": lambda value: _is_tagged(value, "layout"),
    "MemoryFormat": lambda value: _is_tagged(value, "memory_format"),
}


def _is_tagged(value: Any, tag: str) -> bool:
    return isinstance(value, dict) and list(value) == [tag]


def _fits(value: Any, kind: Any) -> bool:
    """Whether an encoded argument matches a type of torch's schemas."""
    if kind.kind() == "OptionalType":
        return value is None or _fits(value, kind.getElementType())
    if kind.kind() == "ListType":
        element = kind.getElementType()
        # torch accepts one number for a list of numbers.
        if not isinstance(value, list | tuple):
            return str(element) in ("int", "SymInt", "float") and _fits(value, element)
        return all(_fits(part, element) for part in value)
    check = _KINDS.get(str(kind))
    return check is not None and check(value)


def written_arguments(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Return the tensor arguments whose elements a call changes."""
    written: list[torch.Tensor] = []
    for position, argument in enumerate(function._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            written.extend(t for t in (value if isinstance(value, list | tuple) else [value]) if t is not None)
    positions, flag = UNDECLARED_WRITES.get(base_name(str(function)), ((), None))
    if positions and (flag is None or args[flag]):
        written.extend(args[p] for p in positions if args[p] is not None)
    return written


def is_random(function: Any) -> bool:
    """Whether the operator draws from the default generator."""
    return torch.Tag.nondeterministic_seeded in function.tags


def describe(op: Op) -> str:
    """Describe an op by name and operator, for messages."""
    return f"'{op.name}' ({op.target})"
