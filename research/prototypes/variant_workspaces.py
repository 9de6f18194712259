"""Workspace and time of each convolution under each setting of torch: python variant_workspaces.py OUT.json TRACE...

A TRACE is a file, or FILE.zip:MEMBER. Each distinct call of a convolution runs on the tensors of its step: as captured
(the empty name), and under each of `CONVOLUTION_SETTINGS`. Bytes: the most that the call has allocated beyond its
results, layout conversions included. Time: the median of five calls between CUDA events, in ns. A setting that refuses
the call is missing.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import zipfile
from pathlib import Path

import torch

from gpusim.errors import ReplayError
from gpusim.gpu.capture.variants import equal_calls
from gpusim.gpu.device import require_gpu, set_precision
from gpusim.gpu.replay.execute import Runner, make_initial
from gpusim.gpu.replay.variants import CONVOLUTION_SETTINGS, CONVOLUTIONS, call_here, in_autotuned_thread
from gpusim.step import load

_PEAK, _NOW = "requested_bytes.all.peak", "requested_bytes.all.current"


def measured(runner: Runner, op: int, settings) -> list[int]:
    """Return [workspace in bytes, time in ns] of one call."""
    function = runner.functions[op]
    outputs = runner._outputs(op)

    def call():
        args, kwargs = runner.arguments(op)
        with torch.no_grad():
            if settings is None:
                return function(*args, **kwargs)
            return call_here(function, args, kwargs, settings, outputs)

    def repeated() -> list[int]:
        call()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        result = call()
        stats = torch.cuda.memory_stats()
        workspace_bytes = stats[_PEAK] - stats[_NOW]
        del result
        times_ns = []
        for _ in range(5):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda._sleep(400_000)
            start.record()
            call()
            end.record()
            torch.cuda.synchronize()
            times_ns.append(round(start.elapsed_time(end) * 1e6))
        return [workspace_bytes, round(statistics.median(times_ns))]

    if settings is not None and settings.benchmark:
        return in_autotuned_thread(repeated)
    return repeated()


def rows_of(path: str) -> dict[str, dict[str, object]]:
    """Return, for each distinct call of a convolution, its ops, its captured workspace, and what each setting takes."""
    trace = load(path).trace
    device = require_gpu()
    set_precision(trace.model.dtype)
    runner = Runner(trace, device)
    runner.bind(make_initial(trace, device, 0).tensors)
    runner.run_in_order()
    rows = {}
    for first, members in equal_calls(trace).items():
        op = trace.ops[first]
        if op.target not in CONVOLUTIONS:
            continue
        ways = {"": measured(runner, first, None)}
        for name, settings in CONVOLUTION_SETTINGS.items():
            try:
                ways[name] = measured(runner, first, settings)
            except (ReplayError, RuntimeError) as refusal:
                print(op.name, name, str(refusal).splitlines()[0][:120])
        kernels_ns = sum(kernel.dur_ns for kernel in op.kernels)
        rows[op.name] = {
            "ops": members,
            "captured_bytes": op.workspace_bytes,
            "captured_ns": kernels_ns,
            "ways": ways,
        }
        print(trace.name, op.name, op.workspace_bytes, kernels_ns, ways, flush=True)
    return rows


def main() -> None:
    out, *names = sys.argv[1:]
    found = {}
    for name in names:
        archive, _, member = name.partition(".zip:")
        path = name
        if member:
            folder = tempfile.mkdtemp()
            path = zipfile.ZipFile(f"{archive}.zip").extract(member, folder)
        found[Path(path).name] = rows_of(path)
        about = {
            "question": "Which workspaces do convolutions take under each setting of torch?",
            "command": " ".join(["python research/prototypes/variant_workspaces.py", "OUT.json", *names]),
            "gpu": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "cudnn": str(torch.backends.cudnn.version()),
            "steps": found,
        }
        Path(out).write_text(json.dumps(about, indent=1) + "\n")
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
