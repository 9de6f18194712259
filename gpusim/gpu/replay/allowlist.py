"""Allow-list of the operators that a trace may call, and of their arguments. The check needs no torch and no GPU.

A trace is an untrusted file; replaying it must run operators and nothing else. So each op names an operator of
`aten_operators.txt`, with its overload. Its arguments are tensors of the trace, numbers, booleans, null, lists of
these, and keywords that torch's schemas enumerate. `gpusim.gpu.replay.saved` and `gpusim.gpu.replay.size_rules` add the
checks that torch itself omits.
"""

from __future__ import annotations

import functools
import math
from importlib import resources
from typing import Any, Final

from gpusim.errors import OperatorError
from gpusim.formats.arguments import TENSOR, problem_with
from gpusim.formats.trace import Op, Trace
from gpusim.gpu.replay.saved import SavedRules
from gpusim.trace.element_sizes import DTYPE_BYTES

Words = dict[str, tuple[int | None, tuple[str, ...]]]

_APPROXIMATE: Final[Words] = {"approximate": (None, ("none", "tanh"))}
_ROUNDING: Final[Words] = {"rounding_mode": (None, ("trunc", "floor"))}
_SCATTER: Final[Words] = {"reduce": (None, ("add", "multiply"))}
_SCATTER_REDUCE: Final[Words] = {"reduce": (4, ("sum", "prod", "mean", "amax", "amin"))}
#: Keywords allowed as arguments: operator -> argument name -> its position (None: by name only) and keywords.
WORDS: Final[dict[str, Words]] = {
    **dict.fromkeys(("aten.gelu", "aten.gelu_", "aten.gelu_backward"), _APPROXIMATE),
    **dict.fromkeys(("aten.div", "aten.div_"), _ROUNDING),
    **dict.fromkeys(("aten.scatter", "aten.scatter_"), _SCATTER),
    **dict.fromkeys(("aten.scatter_reduce", "aten.scatter_reduce_"), _SCATTER_REDUCE),
}
#: Operators that make a tensor without a tensor argument; without a device, torch would put it into host memory.
FACTORIES: Final = frozenset(
    f"aten.{name}"
    for name in [
        "arange",
        "empty",
        "empty_strided",
        "eye",
        "full",
        "linspace",
        "ones",
        "rand",
        "randint",
        "randn",
        "randperm",
        "scalar_tensor",
        "tril_indices",
        "triu_indices",
        "zeros",
    ]
)
#: Position of the shape among the arguments, for operators that make a tensor of a given shape.
SIZES: Final = {
    **dict.fromkeys((f"aten.{n}" for n in ("empty", "empty_strided", "full", "ones", "rand", "randn", "zeros")), 0),
    **dict.fromkeys((f"aten.new_{n}" for n in ("empty", "empty_strided", "full", "ones", "zeros")), 1),
}
#: Errors that a rule may raise on unexpected arguments. A rule that cannot be evaluated refuses the op.
UNCHECKABLE: Final = (ArithmeticError, ValueError, LookupError, TypeError, RecursionError)
#: Bound of integer arguments: larger numbers overflow 64 bits.
MAX_INTEGER: Final = 2**63


@functools.cache
def allowed_operators() -> frozenset[str]:
    """Return operator names with overload, such as `aten.convolution.default`."""
    text = resources.files("gpusim.gpu.replay").joinpath("aten_operators.txt").read_text(encoding="utf-8")
    return frozenset(line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#"))


def not_listed(target: str) -> str:
    """Return the reason to refuse an operator that is not on the list."""
    return f"operator '{target}' is not on the allow-list of replay"


def base_name(target: str) -> str:
    """`aten.convolution.default` -> `aten.convolution`."""
    return target.rpartition(".")[0]


def check_operators(trace: Trace, file: str) -> None:
    """Raise `OperatorError` for the first op that replay refuses, with file, place and operator."""
    if trace.provenance.imported_from is not None:
        problem = "is imported from a profile, which has kernels and no tensors: replay cannot run it"
        raise OperatorError(f"{file}: {problem}; capture the step with `gpusim capture` on its GPU")
    if trace.provenance.estimated:
        problem = "is estimated, without the values that its tensors begin with: replay cannot run it"
        raise OperatorError(f"{file}: {problem}; capture the step with `gpusim capture` on its GPU")
    if trace.model.frontend == "inductor":
        return  # code runs only where trusted (`gpusim.trace.trust`), so there is nothing left to guard
    for index, op in enumerate(trace.ops):
        if op.target not in allowed_operators():
            raise OperatorError(f"{file}: $.ops[{index}].target: {not_listed(op.target)}")
        where, problem = _problem_with_arguments(op)
        if problem:
            raise OperatorError(f"{file}: $.ops[{index}].{where}: operator '{op.target}' is refused: {problem}")
    rules = SavedRules(trace)
    for index, op in enumerate(trace.ops):
        try:
            problem = _problem_with_sizes(op, trace) or rules.problem(index)
        except UNCHECKABLE:
            problem = "its arguments cannot be checked"
        if problem:
            raise OperatorError(f"{file}: $.ops[{index}]: operator '{op.target}' is refused: {problem}")
    for index, tensor in enumerate(trace.tensors):
        if tensor.dtype not in DTYPE_BYTES:
            raise OperatorError(f"{file}: $.tensors[{index}].dtype: unknown dtype '{tensor.dtype}'")


def _problem_with_arguments(op: Op) -> tuple[str, str]:
    """Return the place and reason of the first refused argument of an op, or two empty strings."""
    words = WORDS.get(base_name(op.target), {})
    positional = {place: choices for place, choices in words.values() if place is not None}
    for place, value in enumerate(op.args):
        problem = _problem_with_value(value, positional.get(place, ()))
        if problem:
            return f"args[{place}]", problem
    for name, value in op.kwargs.items():
        problem = _problem_with_value(value, words[name][1] if name in words else ())
        if problem:
            return f"kwargs.{name}", problem
    if base_name(op.target) in FACTORIES and op.kwargs.get("device") is None:
        return "kwargs", "it makes a tensor, and no device is given"
    return "", ""


def _problem_with_value(value: Any, words: tuple[str, ...]) -> str:
    """Return the reason to refuse an encoded argument, or ""."""
    if isinstance(value, str):
        if value in words:
            return ""
        return f"the text {value[:80]!r} is {'not one of ' + ', '.join(words) if words else 'no argument of it'}"
    if value is None or isinstance(value, bool):
        return ""
    if isinstance(value, int):
        return "" if abs(value) < MAX_INTEGER else "a number is too large"
    if isinstance(value, float):
        return "" if math.isfinite(value) else "a number is not finite"
    if isinstance(value, list | tuple):
        return next((problem for part in value if (problem := _problem_with_value(part, ()))), "")
    if not isinstance(value, dict):
        return f"a {type(value).__name__} is not a valid argument"
    wrong = problem_with(value)
    if wrong is not None:
        return wrong
    if "device" in value and value["device"] != "cuda":
        return f"device '{value['device']}' is not the step's GPU, the only device of a replay"
    if "dtype" in value and value["dtype"] not in DTYPE_BYTES:
        return f"unknown dtype '{value['dtype'][:80]}'"
    return ""


def _problem_with_sizes(op: Op, trace: Trace) -> str:
    """Return the reason to refuse the number or shape of an op's results, or ""; both are known before the call."""
    name = base_name(op.target)
    first = op.args[0] if op.args else None
    if name in SIZES and len(op.args) > SIZES[name] and op.outputs and op.outputs[0] is not None:
        shape = trace.tensors[op.outputs[0]].shape
        if op.args[SIZES[name]] not in (list(shape), tuple(shape)):
            return f"it makes a tensor of another shape than {list(shape)}, which the trace has for it"
    if name in ("aten.split", "aten.unsafe_split", "aten.unbind") and isinstance(first, dict) and TENSOR in first:
        shape = trace.tensors[first[TENSOR]].shape
        dim = op.kwargs.get("dim", op.args[-1] if len(op.args) > (1 if name == "aten.unbind" else 2) else 0)
        size = 1 if name == "aten.unbind" else op.args[1] if len(op.args) > 1 else op.kwargs.get("split_size")
        if not isinstance(dim, int) or not isinstance(size, int) or not -len(shape) <= dim < len(shape):
            return "its dimension or size does not fit the tensor"
        parts = max(1, -(-shape[dim] // size)) if size > 0 else 1
        if name == "aten.unbind":
            parts = shape[dim]
        if parts != len(op.outputs):
            return f"it has {parts} results, the trace {len(op.outputs)}"
    return ""
