"""Ways to compile one step: which of Inductor's own decisions are taken another way, by name.

No way is the best for every step. Kernels that join branches save launches and make the branches wait for each other;
a layout that suits the convolutions makes other kernels slower. `gpusim capture --style` compiles one of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from gpusim.errors import UnknownNameError

#: Settings of Inductor beyond those of every capture, by the name of the style.
_SETTINGS: Final[dict[str, dict[str, Any]]] = {
    "default": {},
    "apart": {},
    "combo": {"combo_kernels": True, "benchmark_combo_kernel": False},
    "given_layout": {"layout_optimization": False},
    "apart_given_layout": {"layout_optimization": False},
}
STYLES: Final = tuple(_SETTINGS)
DEFAULT_STYLE: Final = "default"


def settings_of(style: str) -> dict[str, Any]:
    """Inductor's settings for a style. Raises `UnknownNameError`."""
    if style not in _SETTINGS:
        raise UnknownNameError("style", style, STYLES)
    return _SETTINGS[style]


@contextmanager
def decisions(style: str) -> Iterator[None]:
    """Inductor decides within as the style says, where no setting of its own says so."""
    if not style.startswith("apart"):
        yield
        return
    from torch._inductor import lowering

    original = lowering.pointwise_cat
    lowering.pointwise_cat = _apart(original)
    try:
        yield
    finally:
        lowering.pointwise_cat = original


def _apart(joined: Any) -> Any:
    """A concatenation whose parts come out of calls that Inductor does not fuse is written part by part.

    As one kernel, it would wait for all branches; as many, each branch ends with its own.
    """
    from torch._inductor import ir
    from torch._inductor.virtualized import V

    def from_calls(part: Any) -> bool:
        return any(isinstance(V.graph.try_get_buffer(name), ir.ExternKernel) for name in part.get_read_names())

    def concatenate(inputs: Any, dim: int = 0) -> Any:
        if sum(from_calls(part) for part in inputs) < 2:
            return joined(inputs, dim)
        return ir.TensorBox(ir.ConcatKernel.create(inputs, dim))

    return concatenate
