"""What decides on VGG-16's plan in the paper's setting: the speed of shares that are split by height and width.

python research/prototypes/paper_shares.py

Table 5 of Jia et al. 2018 splits the last three convolutions by height and width. Here their sum of costs is compared
with that of samples; then the search runs again with such shares faster by a factor. Figure 1 has 24 ms by samples, 18
by height, 27 by width and 37 by channels for the eighth convolution on four GPUs.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "validate" / "layerwise"))

from paper import explored

from gpusim.layerwise.compute import PassTimes, Times
from gpusim.layerwise.configs import Config
from gpusim.layerwise.layers import Layer
from gpusim.layerwise.search import additive_ns, search
from gpusim.layerwise.shares import Share

GPUS, LAST, BY_MAP = 4, ("conv11", "conv12", "conv13", "pool5"), Config(h=2, w=2)
FACTORS = (1.0, 0.9, 0.8, 0.775, 0.75, 0.7)


@dataclass(frozen=True)
class Faster:
    """Times of which shares with a part of a map, of layers with maps of 14 x 14, are faster by a factor."""

    times: Times
    factor: float

    basis = "a factor"
    by_shape = False

    def share_ns(self, index: int, layer: Layer, share: Share) -> PassTimes:
        """See `Times`."""
        found = self.times.share_ns(index, layer, share)
        part = layer.kind == "convolution" and layer.output[2:] == (14, 14) and share.output[2:] != (14, 14)
        factor = self.factor if part else 1.0
        return PassTimes(found.forward_ns * factor, found.backward_ns * factor, found.error)

    def optimizer_ns(self, weights: float) -> float:
        """See `Times`."""
        return self.times.optimizer_ns(weights)


def main() -> None:
    """Print what the split costs, and the plans by factor."""
    found = explored("vgg16", GPUS)
    problem, best = found.problem, found.best.choice
    names = [layer.name for layer in problem.graph.layers]
    last = [names.index(name) for name in LAST]
    paper = tuple(BY_MAP if index in last else config for index, config in enumerate(best))
    end = {"fc3": Config(c=2), "loss": Config()}
    alone = tuple(end.get(name, config) for name, config in zip(names, best, strict=True))
    ours_ns, paper_ns, alone_ns = additive_ns(problem, [best, paper, alone])
    shares_ns = sum(
        problem.times.share_ns(index, layer, problem.share(index, Config(n=GPUS))).total_ns
        for index, layer in enumerate(problem.graph.layers)
        if index in last
    )
    print(f"found {ours_ns / 1e6:.2f} ms; last convolutions {BY_MAP}: {(paper_ns - ours_ns) / 1e6:+.2f} ms")
    print(f"their shares by samples: {shares_ns / 1e6:.2f} ms; as fast if {1 - (paper_ns - ours_ns) / shares_ns:.3f}")
    print(f"the last layer on two GPUs, the loss on one: {(alone_ns - ours_ns) / 1e6:+.3f} ms")
    for factor in FACTORS:
        times = Faster(problem.times, factor)
        choice = search(replace(problem, times=times, _shares={}, _costs={})).choice
        print(factor, "; ".join(f"{names[index]} {choice[index]}" for index in last))


if __name__ == "__main__":
    main()
