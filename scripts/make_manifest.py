"""Write traces/manifest.json from the traces next to it: python scripts/make_manifest.py [--traces DIR].

Run it whenever a bundled trace is captured anew; tests/repo/test_readme.py compares the manifest with the files. With
--check nothing is written, and the exit status is 1 where the manifest is out of date.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpusim.io.files import write_bytes
from gpusim.trace.store import read_trace

ROOT = Path(__file__).resolve().parent.parent
#: Kind of each network, to find a step like one's own (app/gpusim_dashboard/kinds.py).
KINDS = {
    "branches": ("googlenet", "inception_v3", "nasnetalarge", "squeezenet1_1"),
    "shortcuts": ("densenet121", "resnet50"),
    "transformer": ("transformer_small", "transformer_large", "vit_b_16"),
    "experts": ("experts_small", "experts_large"),
    "decoder": ("decoder_small", "decoder_large"),
    "unet": ("unet_small", "unet_large"),
    "chain": ("vgg16", "alexnet"),
}


def kind_of(network: str) -> str:
    """Return the kind of a network. Exits for a network without one."""
    for kind, networks in KINDS.items():
        if network in networks:
            return kind
    raise SystemExit(f"{network}: enter it under its kind in KINDS of scripts/make_manifest.py")


def entry(path: Path) -> dict[str, Any]:
    """Return the manifest entry of one trace: source, contents, and hash."""
    trace = read_trace(path)
    gpu, model, truth = trace.provenance.gpu, trace.model, trace.ground_truth
    if path.name != f"{trace.name}.json.gz":
        raise SystemExit(f"{path}: holds the trace '{trace.name}', so its name is {trace.name}.json.gz")
    if truth is None:
        raise SystemExit(f"{path}: a bundled trace has $.ground_truth, this one does not")
    data = path.read_bytes()
    return {
        "name": trace.name,
        "file": path.name,
        "gpu": gpu.name,
        "driver": gpu.driver,
        "cuda": gpu.cuda,
        "torch": gpu.torch,
        "cudnn": gpu.cudnn,
        "sm_clock_mhz": gpu.sm_clock_mhz,
        "date": trace.provenance.date,
        "command": trace.provenance.command,
        "gpusim": trace.provenance.gpusim,
        "sha256": hashlib.sha256(data).hexdigest(),
        "bytes": len(data),
        "ops": len(trace.ops),
        "kernels": sum(len(op.kernels) for op in trace.ops),
        "eager_ns": truth.eager.median_ns,
        "graph_ns": truth.graph.median_ns,
        "spec": model.spec,
        "network": model.network,
        "kind": kind_of(model.network),
        "mode": model.mode,
        "batch": model.batch,
        "dtype": model.dtype,
        "memory_format": model.memory_format,
        "frontend": model.frontend,
    }


def manifest(folder: Path) -> dict[str, Any]:
    """Return the manifest of all traces in `folder`, by name."""
    entries = [entry(path) for path in folder.glob("*.json.gz")]
    return {"traces": sorted(entries, key=lambda each: str(each["name"]))}


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the manifest and print a summary, or check it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, default=ROOT / "traces", help="folder of the traces")
    parser.add_argument("--check", action="store_true", help="only say whether the manifest is up to date")
    options = parser.parse_args(arguments)
    folder: Path = options.traces
    document = manifest(folder)
    traces = document["traces"]
    if not traces:
        raise SystemExit(f"{folder}: no traces (*.json.gz)")
    target = folder / "manifest.json"
    text = (json.dumps(document, indent=1) + "\n").encode()
    if options.check:
        current = target.is_file() and target.read_bytes() == text
        print(f"{target} is up to date" if current else f"{target} is out of date: run python scripts/make_manifest.py")
        return 0 if current else 1
    write_bytes(target, text)
    print(f"{target}: {len(traces)} traces, {sum(trace['bytes'] for trace in traces)} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
