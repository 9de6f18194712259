"""Copies of images among the kernels of a training step, by style of compiling it. Needs no GPU.

    python research/prototypes/copies_by_style.py tests/support/networks.py:residual 2 -o copies.json

A copy is a kernel that only writes one tensor in another order of memory: of a tensor from before the step (the batch,
weights), into a result (gradients), or of another value of the step. Kernels are those for a CPU, which are the same
loops; calls of operators that torch lowers for GPUs only differ.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from gpusim.gpu.capture.capture import build_step
from gpusim.gpu.capture.joint_graph import joint_graph
from gpusim.gpu.capture.options import CaptureOptions
from gpusim.gpu.capture.record import record
from gpusim.gpu.inductor import step as step_module
from gpusim.gpu.inductor.functional import Traced
from gpusim.gpu.inductor.own_step import own_step

STYLES = ("given_layout", "default", "channels_last")


def is_copy(node: Any) -> bool:
    from torch._inductor import ir

    data = node.data if isinstance(node, ir.ComputedBuffer) else None
    return isinstance(data, ir.Pointwise) and data.num_reads() == 1 and data.inner_fn_opcount().num_ops == 1


def counted() -> dict[str, int]:
    """Return the copies in the graph that Inductor has now, and the bytes that those within the step write."""
    from torch._inductor import ir
    from torch._inductor.virtualized import V

    found: Counter[str] = Counter()
    for node in V.graph.scheduler.nodes:
        parts = [part.node for part in node.get_nodes()]
        found["kernels"] += all(isinstance(part, ir.ComputedBuffer) for part in parts)
        for part in parts if all(map(is_copy, parts)) else ():
            (read,) = (dep.name for dep in part.get_reads())
            if read in V.graph.graph_inputs:
                found["of inputs"] += 1
            elif part.get_name() in V.graph.get_output_names():
                found["into results"] += 1
            else:
                scattered = any(getattr(origin.target, "__name__", "").startswith("scatter_add")
                                for origin in part.get_origins())  # fmt: skip
                found["for scattering" if scattered else "within"] += 1
                if not scattered:
                    found["bytes within"] += int(part.get_numel()) * part.get_dtype().itemsize
    return dict(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("spec")
    parser.add_argument("batch", type=int)
    parser.add_argument("-o", dest="out", type=Path, metavar="FILE", help="add the rows to this JSON file")
    asked = parser.parse_args()
    device = torch.device("cpu")
    step = build_step(CaptureOptions(asked.spec, "train", asked.batch, "fp32"), device)
    graph = joint_graph(step)
    torch.manual_seed(0)
    recorded = record(graph)
    rows: list[dict[str, Any]] = []
    original = step_module.read_lines

    def noting(*given: Any) -> Any:
        rows[-1].update(counted())
        return original(*given)

    step_module.read_lines = noting
    traced = Traced()
    for style in STYLES:
        rows.append({"spec": asked.spec, "batch": asked.batch, "torch": str(torch.__version__), "style": style})
        own_step(graph, recorded, True, style, None, traced)
        print(json.dumps(rows[-1]), flush=True)
    if asked.out:
        before = json.loads(asked.out.read_text()) if asked.out.exists() else []
        asked.out.write_text(json.dumps([*before, *rows], indent=1) + "\n")


if __name__ == "__main__":
    main()
