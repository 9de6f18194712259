"""Operators as torch knows them: from a name to a callable, and what a call changes."""

from __future__ import annotations

import functools
from typing import Any

import torch

from gpusim.errors import OperatorError
from gpusim.runtime.allowlist import allowed_operators, base_name
from gpusim.trace.schema import Op

#: Operators that change arguments although their schema does not say so: argument positions written in training mode,
#: and the position of the flag that says whether it is (None: always).
UNDECLARED_WRITES: dict[str, tuple[tuple[int, ...], int | None]] = {
    "aten.cudnn_batch_norm": ((3, 4), 5),
    "aten.native_batch_norm": ((3, 4), 5),
    "aten.miopen_batch_norm": ((3, 4), 5),
    "aten._batch_norm_impl_index": ((3, 4), 5),
    "aten.batch_norm_gather_stats": ((3, 4), None),
    "aten.batch_norm_gather_stats_with_counts": ((3, 4), None),
}


@functools.cache
def resolve(target: str) -> Any:
    """The callable of an allowed operator. Raises `OperatorError` for one not allowed or not in this torch."""
    if base_name(target) not in allowed_operators():
        raise OperatorError(f"operator '{target}' is not on the allow-list of replay")
    namespace, name, overload = target.split(".", 2)
    if namespace == "torchvision":
        import torchvision  # noqa: F401  (registers its operators)
    try:
        return getattr(getattr(getattr(torch.ops, namespace), name), overload)
    except AttributeError as cause:
        raise OperatorError(f"torch {torch.__version__} has no operator '{target}'") from cause


def written_arguments(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors among the arguments whose elements a call changes."""
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
    """An op for messages: name and operator."""
    return f"'{op.name}' ({op.target})"
