"""State of launches in which torch.compile, alone in a process, runs: the fast one or the slow one.

    python research/prototypes/state_of_peers.py OUT.json torchvision:googlenet infer 1 torch_compile_own_graph

The call is timed after it was made, then once a second context has brought the fast state, then after streams have
ended it.
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from state_kick import Calls

from gpusim.formats.results import Baseline
from gpusim.formats.trace import Mode
from gpusim.gpu.capture.models import load_step
from gpusim.gpu.device import provenance, require_gpu, set_precision
from gpusim.gpu.optimize.measure import batches_of, times_in_turns
from gpusim.gpu.optimize.peers import make

ROUNDS = 5


def main() -> None:
    """Write the time of a call in each state."""
    arguments = argparse.ArgumentParser()
    arguments.add_argument("out", type=Path)
    for word in ("spec", "mode", "batch", "peer"):
        arguments.add_argument(word)
    given = arguments.parse_args()
    device = require_gpu()
    set_precision("tf32")
    command = "python research/prototypes/state_of_peers.py OUT.json SPEC MODE BATCH PEER"
    result: dict[str, Any] = provenance(command, partial(torch.cuda._sleep, 2_000_000))
    step = load_step(
        given.spec,
        mode=cast(Mode, given.mode),
        batch=int(given.batch),
        dtype="tf32",
        memory_format="contiguous",
        device=device,
        seed=0,
    )
    call = make(cast(Baseline, given.peer), step).call
    batches = batches_of(step)

    def streams() -> None:
        for priority in (0, -1):
            for _ in range(32):
                with torch.cuda.stream(torch.cuda.Stream(priority=priority)):
                    torch.cuda._sleep(1000)

    result |= {"spec": given.spec, "mode": given.mode, "batch": given.batch, "peer": given.peer, "ns": {}}
    for state, action in (
        ("as made", lambda: None),
        ("fast", Calls().made),
        ("slow", streams),
        ("again", Calls().made),
    ):
        action()
        torch.cuda.synchronize()
        result["ns"][state] = times_in_turns({"": call}, batches, ROUNDS, launches=lambda: None)[""].median_ns
        print(given.spec, given.peer, state, result["ns"][state], flush=True)
        given.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
