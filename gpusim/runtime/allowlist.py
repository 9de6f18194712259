"""The allow-list: which operators a trace may call. Reading it needs no torch.

A trace is a file from anywhere; replaying it must not run anything but arithmetic. So only the operators named in
`aten_operators.txt` are called: ATen and torchvision operators that compute tensors from tensors. Left out on purpose
are those that read or write files, sparse, quantised and nested tensors, and those whose output shape depends on
values.
"""

from __future__ import annotations

import functools
from importlib import resources

from gpusim.errors import OperatorError
from gpusim.trace.schema import Trace


@functools.cache
def allowed_operators() -> frozenset[str]:
    """Names without overload, such as `aten.convolution`."""
    text = resources.files("gpusim.runtime").joinpath("aten_operators.txt").read_text(encoding="utf-8")
    return frozenset(line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#"))


def base_name(target: str) -> str:
    """`aten.convolution.default` -> `aten.convolution`."""
    return target.rpartition(".")[0]


def check_operators(trace: Trace, file: str) -> None:
    """Raise `OperatorError` for the first op outside the allow-list, naming file, place and operator."""
    for index, op in enumerate(trace.ops):
        if base_name(op.target) not in allowed_operators():
            raise OperatorError(
                f"{file}: $.ops[{index}].target: operator '{op.target}' is not on the allow-list of replay"
            )
