"""A step as Inductor's kernels in an entry of the cache, without code, so that a second start does not lower it again.

The text of each kernel is in torch's own cache on disk; an entry has its key there and its hash.
"""

from __future__ import annotations

import hashlib

from gpusim.errors import OperatorError, TraceError
from gpusim.formats.trace import Op, Source, Storage, Tensor
from gpusim.gpu.capture.record import Recorded
from gpusim.gpu.inductor.kernels import store_text, stored_text
from gpusim.io.files import Count, Document


class KeptStep(Document, frozen=True, kw_only=True):
    """Ops and tensors of a step that Inductor has compiled."""

    ops: tuple[Op, ...]
    tensors: tuple[Tensor, ...]
    storages: tuple[Storage, ...]
    outputs: tuple[Count, ...]
    gradients: tuple[Count, ...]
    returned: tuple[Count | None, ...]
    named: dict[str, Count]
    """Tensor from before the step, as text -> the same tensor in the step as ATen calls."""
    sources: dict[str, str]
    """Hash of a kernel's text -> its key in torch's cache."""


def kept_step(made: Recorded, recorded: Recorded) -> KeptStep | None:
    """Return what to keep of a step, `recorded` as ATen calls, and store its kernels' text in torch's cache.

    None where Inductor has computed constants, which would have to be kept, too.
    """
    before = {index for index, tensor in enumerate(made.tensors) if tensor.init is not None}
    if before != made.named.keys():
        return None
    theirs = {name: index for index, name in recorded.named.items()}
    return KeptStep(
        ops=tuple(made.ops),
        tensors=tuple(made.tensors),
        storages=tuple(made.storages),
        outputs=tuple(made.outputs),
        gradients=tuple(made.gradients),
        returned=tuple(made.returned),
        named={str(index): theirs[name] for index, name in made.named.items()},
        sources={source.sha256: store_text(source.text) for source in made.sources},
    )


def made_of(kept: KeptStep, recorded: Recorded, file: str) -> Recorded:
    """Return the step of an entry. Raises `OperatorError` where torch's cache lacks a kernel, `TraceError` for tensors
    that `recorded` does not have.
    """
    sources = []
    for sha256, key in kept.sources.items():
        text = stored_text(key)
        if text is None or hashlib.sha256(text.encode()).hexdigest() != sha256:
            raise OperatorError("torch's cache has no kernels of it any more")
        sources.append(Source(sha256=sha256, text=text))
    try:
        named = {int(index): recorded.named[theirs] for index, theirs in kept.named.items()}
    except (KeyError, ValueError) as cause:
        raise TraceError(file, f"names no tensor of this step ({cause})", place="$.step.named") from cause
    return Recorded(
        ops=list(kept.ops),
        tensors=list(kept.tensors),
        storages=list(kept.storages),
        outputs=list(kept.outputs),
        gradients=list(kept.gradients),
        initial={},
        final={},
        named=named,
        sources=sources,
        returned=list(kept.returned),
    )
