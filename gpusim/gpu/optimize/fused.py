"""The captured step with Inductor's kernels, on the same tensors of the user's."""

from __future__ import annotations

import warnings
from dataclasses import replace

import torch

from gpusim.errors import CaptureError
from gpusim.gpu.capture.rebuild import bare_trace
from gpusim.gpu.capture.record import Recorded
from gpusim.gpu.capture.user_step import UserStep
from gpusim.gpu.inductor.functional import Traced
from gpusim.gpu.inductor.kernels import Compiling
from gpusim.gpu.inductor.own_step import own_step
from gpusim.gpu.inductor.styles import DEFAULT_STYLE, Noted
from gpusim.gpu.inductor.versions import require_supported
from gpusim.gpu.optimize.captured import Captured, Computed, Returned

#: Alignment that Inductor's wide loads and stores require, in bytes.
ALIGNED_BYTES = 16


def fused(
    step: UserStep,
    captured: Captured,
    style: str = DEFAULT_STYLE,
    noted: Noted | None = None,
    traced: Traced | None = None,
) -> Captured:
    """Return the step with Inductor's kernels. Outputs, gradients and states are those of `captured`.

    Inductor's decisions are recorded in `noted`; `traced` is shared by the styles of one step. Kernels are still being
    compiled on return: `functions` waits. Raises `GpusimError` where Inductor, or gpusim, cannot compile it.
    """
    require_supported()
    graph, recorded = captured.graph, captured.recorded
    assert graph is not None
    with warnings.catch_warnings(), torch.autocast(step.device.type, enabled=False), torch.no_grad():
        warnings.simplefilter("ignore")  # Inductor's advice is for whoever compiles
        made = own_step(graph, recorded, captured.options.mode == "train", style, noted, traced)
        return bound(step, captured, made, style)


def bound(
    step: UserStep, captured: Captured, made: Recorded, style: str, compiling: Compiling | None = None
) -> Captured:
    """Return the step with the kernels of `made` on the user's tensors; `compiling` has them already. Raises as
    `fused`.
    """
    recorded = captured.recorded
    _check_aligned(captured)
    options = replace(captured.options, frontend="inductor")
    trace = bare_trace(options, step, made, captured.trace.model.fixed, own=True)
    theirs = {name: index for index, name in recorded.named.items()}
    live = {index: captured.live[theirs[name]] for index, name in made.named.items()}
    pristine = {index: captured.pristine[theirs[name]] for index, name in made.named.items()}
    results = dict(zip(recorded.gradients, made.gradients, strict=True))
    pairs = zip(recorded.returned, made.returned, strict=True)
    returned = {their: mine for their, mine in pairs if their is not None and mine is not None}
    leaves = (
        replace(leaf, tensor=returned[leaf.tensor]) if isinstance(leaf, Computed) else leaf
        for leaf in captured.returned.leaves
    )
    return replace(
        captured,
        trace=trace,
        recorded=replace(made, initial={}),
        live=live | made.initial,
        returned=Returned(captured.returned.spec, tuple(leaves)),
        gradients={results[index]: parameter for index, parameter in captured.gradients.items()},
        pristine=pristine | {index: tensor.clone() for index, tensor in made.initial.items()},
        graph=None,
        style=style,
        compiling=compiling or Compiling(trace.sources),
    )


def _check_aligned(captured: Captured) -> None:
    """Raise `CaptureError` for memory of the user's without the alignment of Inductor's kernels."""
    for index, tensor in captured.live.items():
        begins = (tensor.untyped_storage().data_ptr(), tensor.data_ptr())
        if tensor.device.type == "cuda" and any(begin % ALIGNED_BYTES for begin in begins):
            name = captured.trace.tensors[index].name
            raise CaptureError(f"the memory of '{name}' does not begin at a multiple of {ALIGNED_BYTES} bytes")
