"""Least time of a plan of AlexNet on four GPUs, communication left out, from shares measured alone.

python research/prototypes/bound_of_shares.py research/data/shares_of_four_h200_20261126.json
"""

from __future__ import annotations

import json
import sys
from math import prod
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "validate" / "layerwise"))

from measured_shares import network

from gpusim.layerwise.compute import share_key
from gpusim.layerwise.shares import Share

GPUS, BATCH = 4, 32


def main() -> None:
    """Print the fastest quarter share of each layer, and their sum."""
    times = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    total_ns = 0.0
    for layer in network("alexnet", BATCH).for_gpus(GPUS).layers:
        kind = share_key(layer, Share((1, 1, 1, 1), 1)).split(" -> ")[0]
        shares = []
        for key, (forward_ns, backward_ns, *_) in times.items():
            name, output = key.split(" -> ")
            extents = [int(each) for each in output.split(" of")[0].split("x")]
            if name == kind and prod(extents) * GPUS == prod(layer.output):
                shares.append((forward_ns + backward_ns, extents))
        least_ns, extents = min(shares)
        total_ns += least_ns
        print(f"{layer.name:8} {least_ns / 1e3:8.0f} us  {'x'.join(map(str, extents))}")
    print(f"{'all':8} {total_ns / 1e3:8.0f} us")


if __name__ == "__main__":
    main()
