"""Summary of the limits of a step in words."""

from __future__ import annotations

from typing import Final

from gpusim.analysis.limits import Scope
from gpusim.analysis.relaxed import CONTENTION, DEPENDENCIES, DRAM, FRONT_END, GAPS, SMS, STREAMS

#: Meaning of each limit for a user.
MEANING: Final = {
    DEPENDENCIES: "operations wait for each other, and no schedule changes that",
    GAPS: "each kernel and each join costs time of its own: operator fusion makes fewer",
    FRONT_END: "kernels start one after the other: operator fusion makes fewer",
    SMS: "kernels already fill the GPU: a smaller batch or a larger GPU leaves room for others",
    CONTENTION: "kernels that share the GPU slow each other down",
    DRAM: "kernels that run together share the memory's bandwidth: operator fusion moves fewer bytes",
    STREAMS: "more streams would help",
}
#: Maximum number of losses named, and minimum share of each.
_NAMED, _LEAST_SHARE = 2, 0.05


def limits_sentences(scope: Scope) -> list[str]:
    """Return sentences on the gain of the best schedule and the meaning of the largest losses."""
    if scope.potential_ns <= 0:
        return ["There is nothing to win: the step is one operation long."]
    sentences = [f"The best list schedule wins {scope.share(scope.won_ns):.0%} of what there is to win."]
    losses = sorted(scope.losses, key=lambda loss: -loss.loss_ns)[:_NAMED]
    return sentences + [
        f"{scope.share(loss.loss_ns):.0%} is lost to {loss.limit}: {MEANING[loss.limit]}."
        for loss in losses
        if scope.share(loss.loss_ns) >= _LEAST_SHARE
    ]


def conclusion(scope: Scope) -> str:
    """Return a summary of the limits in one or two sentences: the losses, their causes, and remedies."""
    if scope.potential_ns <= 0:
        return limits_sentences(scope)[0]
    losses = [
        loss
        for loss in sorted(scope.losses, key=lambda loss: -loss.loss_ns)[:_NAMED]
        if scope.share(loss.loss_ns) >= _LEAST_SHARE
    ]
    won = f"{scope.share(scope.won_ns):.0%} of what there is to win is won"
    if not losses:
        return f"{won}; nothing that is left is worth a change."
    parts = [f"{scope.share(loss.loss_ns):.0%} is lost to {loss.limit} ({MEANING[loss.limit]})" for loss in losses]
    return f"{won}; {'; '.join(parts)}."
