"""Ways to compile one step: which of Inductor's own decisions are taken another way, by name.

No way is the best for every step. Kernels that join branches save launches and make the branches wait for each other;
a layout that suits the convolutions makes other kernels slower. `gpusim capture --style` compiles one of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
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


@dataclass
class Noted:
    """What Inductor decided in one compilation, where another style decides otherwise."""

    style: str = DEFAULT_STYLE
    joins_calls: bool = False
    """Whether results of several calls are written by one kernel, which waits for all of them."""
    layout_optimized: bool = False
    """Whether images are channels last that were not before."""

    def other_styles(self) -> list[str]:
        """Styles that make other kernels of the same step, most promising first."""
        given = self.style == "given_layout" or not self.layout_optimized
        styles = [] if not self.joins_calls else ["apart_given_layout" if given else "apart"]
        if self.layout_optimized or self.style == "given_layout":
            styles.append("given_layout" if self.style == DEFAULT_STYLE else DEFAULT_STYLE)
        return styles


def first_style(images: bool, training: bool) -> str:
    """The style to begin with; `images` says whether there are convolutions of images that are not channels last.

    In training Inductor of torch 2.11 puts images channels last on their way forward only: a convolution's backward
    takes them as eager lays them out (`constrain_to_fx_strides` in `_inductor/lowering.py`), each copied once more.
    """
    return "given_layout" if images and training else DEFAULT_STYLE


@contextmanager
def decisions(style: str, noted: Noted) -> Iterator[None]:
    """Inductor decides within as the style says, where no setting of its own says so; what it decides is noted."""
    from torch._inductor import lowering

    original = lowering.pointwise_cat
    lowering.pointwise_cat = _watched(original, style.startswith("apart"), noted)
    try:
        yield
    finally:
        lowering.pointwise_cat = original


def _watched(joined: Any, apart: bool, noted: Noted) -> Any:
    """A concatenation whose parts come out of calls that Inductor does not fuse is noted, or written part by part.

    As one kernel, it waits for all branches; as many, each branch ends with its own.
    """
    from torch._inductor import ir
    from torch._inductor.virtualized import V

    def from_calls(part: Any) -> bool:
        return any(isinstance(V.graph.try_get_buffer(name), ir.ExternKernel) for name in part.get_read_names())

    def concatenate(inputs: Any, dim: int = 0) -> Any:
        if sum(from_calls(part) for part in inputs) < 2:
            return joined(inputs, dim)
        noted.joins_calls = True
        if not apart:
            return joined(inputs, dim)
        return ir.TensorBox(ir.ConcatKernel.create(inputs, dim))

    return concatenate
