"""Styles of compiling one step: named sets of changes to Inductor's decisions.

No style is best for every step. Kernels that join branches save launches and make the branches wait for each other; a
layout that suits the convolutions makes other kernels slower. `gpusim capture --style` selects one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Final

from gpusim.errors import UnknownNameError
from gpusim.gpu.inductor.gemv import blocks_of_sums

DEFAULT_STYLE: Final = "default"
GIVEN_LAYOUT: Final = "given_layout"
#: Layout in which the graph itself has images channels last: see `gpusim.gpu.inductor.channels_last`.
CHANNELS_LAST: Final = "channels_last"
#: Kind of kernels in which products of a matrix and a vector are sums: see `gpusim.gpu.inductor.gemv`.
GEMV: Final = "gemv"
#: Additional settings of Inductor, by kind of kernels and by layout of images; the first are Inductor's own choices.
_KINDS: Final[dict[str, dict[str, Any]]] = {
    "": {},
    "apart": {},
    "combo": {"combo_kernels": True, "benchmark_combo_kernel": False},
    GEMV: {},
}
_LAYOUTS: Final[dict[str, dict[str, Any]]] = {
    "": {},
    GIVEN_LAYOUT: {"layout_optimization": False},
    CHANNELS_LAST: {"layout_optimization": True, "force_layout_optimization": True},
}


def _named(kind: str, layout: str) -> str:
    return "_".join(filter(None, (kind, layout))) or DEFAULT_STYLE


#: Additional settings of Inductor, by style: a kind, a layout, or both.
_SETTINGS: Final = {
    _named(kind, layout): {**_KINDS[kind], **_LAYOUTS[layout]} for layout in _LAYOUTS for kind in _KINDS
}
STYLES: Final = tuple(_SETTINGS)


def settings_of(style: str) -> dict[str, Any]:
    """Return Inductor's settings for a style. Raises `UnknownNameError`."""
    if style not in _SETTINGS:
        raise UnknownNameError("style", style, STYLES)
    return _SETTINGS[style]


def converts_images(style: str) -> bool:
    """Whether the step's graph is made channels last before Inductor has it."""
    return _layout_of(style) == CHANNELS_LAST


def sums_products(style: str) -> bool:
    """Whether products of a matrix and a vector become sums before Inductor has the graph."""
    return style.startswith(GEMV)


def _layout_of(style: str) -> str:
    """Return the layout that a style asks for, or "" where Inductor decides."""
    return next((layout for layout in _LAYOUTS if layout and style.endswith(layout)), "")


@dataclass
class Noted:
    """Inductor's decisions in one compilation, where another style decides otherwise."""

    style: str = DEFAULT_STYLE
    joins_calls: bool = False
    """Whether one kernel writes results of several calls, so that it waits for all of them."""
    layout_optimized: bool = False
    """Whether Inductor made images channels last."""

    def other_styles(self, combos: bool = False) -> list[str]:
        """Return styles that make other kernels of the same step, most promising first.

        `combos`: combo kernels promise to save launches.
        """
        layout = _layout_of(self.style)
        styles = [_named("", layout)] if sums_products(self.style) else []
        if self.joins_calls:
            styles.append(_named("apart", layout if layout or self.layout_optimized else GIVEN_LAYOUT))
        if layout == GIVEN_LAYOUT:
            styles.append(CHANNELS_LAST)
        elif self.layout_optimized:
            styles.append(GIVEN_LAYOUT)
        if combos:
            styles.append(_named("combo", layout))
        return styles


def first_style(trains_images: bool, channels_last_is_faster: bool, mostly_gemv: bool = False) -> str:
    """Return the style to begin with.

    `trains_images`: images that are not channels last enter trained convolutions. `mostly_gemv`: most matrices are read
    for one row.

    In training Inductor of torch 2.11 makes images channels last in the forward pass only: a convolution's backward
    takes them in eager's layout (`constrain_to_fx_strides` in `_inductor/lowering.py`), each copied once more. The
    style `channels_last` copies none.
    """
    if not trains_images:
        return GEMV if mostly_gemv else DEFAULT_STYLE
    return CHANNELS_LAST if channels_last_is_faster else GIVEN_LAYOUT


@contextmanager
def decisions(style: str, noted: Noted) -> Iterator[None]:
    """Apply the style within this context, where no setting of Inductor's does, and record decisions in `noted`."""
    from torch._inductor import lowering

    original = lowering.pointwise_cat
    lowering.pointwise_cat = _watched(original, style.startswith("apart"), noted)
    try:
        with blocks_of_sums() if sums_products(style) else nullcontext():
            yield
    finally:
        lowering.pointwise_cat = original


def _watched(joined: Any, apart: bool, noted: Noted) -> Any:
    """Wrap concatenation: record one whose parts come from unfused calls, or write it part by part.

    As one kernel, it waits for all branches; split, each branch ends with its own.
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
