"""How far an optimized step is from FP64, beside eager and torch.compile, with dropout off. Needs a GPU.

    python benchmarks/deviations.py torchvision:googlenet train 8 -o deviations.json

`gpusim validate` compares a step with FP64, too, but not one with dropout: no two steps of it are alike. Here each
dropout has a probability of 0, so the kernels of dropout do not run; all others do. Steps are added to the file.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from torch.nn.modules.dropout import _DropoutNd

from gpusim.formats.results import Baseline
from gpusim.gpu.capture.models import ModelStep, load_step
from gpusim.gpu.device import provenance, require_gpu, set_precision
from gpusim.gpu.optimize import measure
from gpusim.gpu.optimize.measure import Asked
from gpusim.gpu.optimize.peers import Contender, Exact, make, tensors_of
from gpusim.gpu.optimize.sensitive import make_sensitive

PEERS: Final[tuple[Baseline, ...]] = ("eager", "torch_compile_own_graph")
#: Search budget, that of `validate/compile.toml`.
BUDGET_S: Final = 9.0
BEGIN: Final = time.perf_counter()


def say(text: object) -> None:
    print(f"[{time.perf_counter() - BEGIN:6.1f}]", text, flush=True)


def without_dropout(step: ModelStep) -> int:
    """Set the probability of each dropout module of the step's model to 0; return their number."""
    dropouts = [module for module in step.module.modules() if isinstance(module, _DropoutNd)]
    for module in dropouts:
        module.p = 0.0
    return len(dropouts)


def deviations(step: ModelStep, asked: Asked, said: Callable[[str], None] = say) -> dict[str, Any]:
    """Return the distance of results and gradients from FP64, over their norm, of each way to run the step."""
    dropouts = without_dropout(step)
    sensitive = make_sensitive(step, asked.dtype, asked.seed)
    exact, model = Exact(step), copy.deepcopy(step.module)
    fast = measure.optimized(step, model, asked, said)
    found = {"optimize": exact.deviation(Contender(fast, model))}
    for peer in PEERS:
        said(f"making {peer}")
        found[peer] = exact.deviation(make(peer, step))
    return {
        "step": f"{asked.spec} {asked.mode} {asked.batch} {asked.dtype} {asked.memory_format}",
        "dropouts": dropouts,
        "sensitive": sensitive,
        "frontend": None if fast.gain is None else fast.gain.frontend,
        "deviations": found,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("spec")
    parser.add_argument("mode", choices=("infer", "train"))
    parser.add_argument("batch", type=int)
    parser.add_argument("--dtype", default="tf32")
    parser.add_argument("--memory-format", default="contiguous")
    parser.add_argument("-o", type=Path, required=True, help="file of results, with provenance")
    given = parser.parse_args()
    device = require_gpu()
    set_precision(given.dtype)
    step = load_step(given.spec, mode=given.mode, batch=given.batch, dtype=given.dtype,
                     memory_format=given.memory_format, device=device, seed=0)  # fmt: skip
    asked = Asked(given.spec, given.mode, given.batch, given.dtype, given.memory_format, (), (), 8, BUDGET_S, 0)
    row = deviations(step, asked)
    eager = make("eager", step)
    rows = json.loads(given.o.read_text(encoding="utf-8")) if given.o.exists() else []
    rows.append(row | provenance("python benchmarks/deviations.py", lambda: eager.call(*tensors_of(step))))
    given.o.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    say(json.dumps(row))


if __name__ == "__main__":
    main()
