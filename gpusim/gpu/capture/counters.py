"""`gpusim capture --counters`: add Nsight Compute (`ncu`) hardware counters of each kernel to a trace.

A separate process runs the step from the trace under ncu, in recorded order on one stream. ncu replays each kernel once
per pass that the metrics need. Clocks and caches are not controlled, so the counts are those of the step. Launches are
matched with the trace's kernels by order; name, grid and block must agree. Names are compared only in the part that all
tools write alike (`gpusim.trace.kernel_names`).
"""

from __future__ import annotations

import csv
import glob
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from gpusim.errors import CaptureError, GpuError
from gpusim.formats.trace import Counters, Dim3, Kernel, Trace
from gpusim.io.scratch import scratch_folder
from gpusim.trace.kernel_names import base_name, shown_name
from gpusim.trace.store import write_trace

#: ncu metric of each field of `Counters`.
METRICS: dict[str, str] = {
    "dram_bytes": "dram__bytes.sum",
    "l2_bytes": "lts__t_bytes.sum",
    "instructions": "sm__inst_executed.sum",
    "tensor_instructions": "sm__inst_executed_pipe_tensor.sum",
    "smem_config_bytes": "launch__shared_mem_config_size",
}
TIMEOUT_S = 1800
#: Install locations to search after PATH.
PLACES = ("/usr/local/cuda/bin/ncu", "/usr/local/cuda-*/bin/ncu", "/opt/nvidia/nsight-compute/*/ncu")
DENIED = "ERR_NVGPUCTRPERM"
_FACTORS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_UNIT = re.compile(r"^([KMGT]?)(?:byte|inst)$")


@dataclass(frozen=True)
class Launch:
    """A kernel launch in ncu's table."""

    name: str
    grid: Dim3
    block: Dim3
    counters: Counters


def with_counters(trace: Trace, seed: int, say: Callable[[str], None] = lambda _: None) -> Trace:
    """Return the trace with counters in every kernel. Raises `GpuError` without ncu or its permission,
    `CaptureError`.
    """
    ncu = find_ncu()
    kernels = sum(kernel.kind == "kernel" for op in trace.ops for kernel in op.kernels)
    say(f"counting the work of {kernels} kernels with {ncu}")
    with scratch_folder() as folder:
        step, table = folder / "step.json", folder / "counters.csv"
        write_trace(trace, step)
        command = ncu_command(ncu, step, table, seed)
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired as cause:
            raise GpuError(f"ncu took longer than {TIMEOUT_S} s") from cause
        text = table.read_text(encoding="utf-8", errors="replace") if table.is_file() else ""
    said = "\n".join((done.stdout, done.stderr, text))
    if DENIED in said:
        raise GpuError(
            f"ncu may not read the GPU's counters ({DENIED}): they are for administrators, unless the driver's option "
            "NVreg_RestrictProfilingToAdminUsers is 0; without counters they are estimated"
        )
    if done.returncode:
        raise GpuError(f"ncu failed (exit status {done.returncode}): {_reason(said)}")
    counted = attach(trace, parse_ncu(text))
    return msgspec.structs.replace(
        counted, provenance=msgspec.structs.replace(counted.provenance, counters=ncu_version(ncu))
    )


def find_ncu() -> str:
    """Return the path of ncu. Raises `GpuError` where there is none."""
    program = shutil.which("ncu") or next((path for place in PLACES for path in sorted(glob.glob(place))[::-1]), None)
    if program is None:
        raise GpuError("no ncu (Nsight Compute) on PATH: counters need it; without counters they are estimated")
    return program


def ncu_version(ncu: str) -> str:
    """Return "ncu" with its version."""
    done = subprocess.run([ncu, "--version"], capture_output=True, text=True, timeout=60)
    version = re.search(r"[Vv]ersion (\S+)", done.stdout)
    return f"ncu {version[1]}" if version else "ncu"


def ncu_command(ncu: str, step: Path, table: Path, seed: int) -> list[str]:
    """Return the command that runs `gpusim.gpu.capture.counted_step` under ncu and writes a table with a row per
    launch.
    """
    return [
        ncu,
        "--clock-control=none",
        "--cache-control=none",
        "--profile-from-start=off",
        "--print-units=base",
        "--csv",
        "--page=raw",
        f"--metrics={','.join(METRICS.values())}",
        f"--log-file={table}",
        sys.executable,
        "-m",
        "gpusim.gpu.capture.counted_step",
        str(step),
        str(seed),
    ]


def parse_ncu(text: str) -> list[Launch]:
    """Return the launches in ncu's raw table (`--csv --page raw`), in order. Raises `CaptureError`.

    Lines before the header are ncu's log; the row below the header has the units.
    """
    lines = text.splitlines()
    start = next((number for number, line in enumerate(lines) if line.replace('"', "").startswith("ID,")), None)
    if start is None:
        raise CaptureError(f"ncu wrote no table of counters: {_reason(text)}")
    rows = list(csv.DictReader(line for line in lines[start:] if not line.startswith("==")))
    wanted = {"Kernel Name", "Grid Size", "Block Size", *METRICS.values()}
    missing = sorted(wanted - set(rows[0] if rows else ()))
    if missing:
        raise CaptureError(
            f"ncu's table has no column '{missing[0]}': this ncu has another name for it, or the GPU lacks it"
        )
    units, launches = rows[0], rows[1:]
    return [
        Launch(
            name=row["Kernel Name"],
            grid=_dim3(row["Grid Size"]),
            block=_dim3(row["Block Size"]),
            counters=Counters(
                **{field: _number(row[metric], units[metric], metric, row["ID"]) for field, metric in METRICS.items()}
            ),
        )
        for row in launches
    ]


def attach(trace: Trace, launches: Sequence[Launch]) -> Trace:
    """Return the trace with each launch's counters in its kernel. Raises `CaptureError` at the first mismatch."""
    places = [
        (op, number)
        for op, node in enumerate(trace.ops)
        for number, kernel in enumerate(node.kernels)
        if kernel.kind == "kernel"
    ]
    counters: dict[tuple[int, int], Counters] = {}
    for (op, number), launch in zip(places, launches, strict=False):
        kernel = trace.ops[op].kernels[number]
        if (base_name(kernel.name), kernel.grid, kernel.block) != (base_name(launch.name), launch.grid, launch.block):
            raise CaptureError(
                f"under ncu op {op} '{trace.ops[op].name}' launched {_shape(launch.name, launch.grid, launch.block)}, "
                f"in the trace it is {_shape(kernel.name, kernel.grid, kernel.block)}: the step is not the same"
            )
        counters[(op, number)] = launch.counters
    if len(places) != len(launches):
        raise CaptureError(f"ncu saw {len(launches)} kernels, the trace has {len(places)}: the step is not the same")
    ops = tuple(
        msgspec.structs.replace(
            node,
            kernels=tuple(_counted(kernel, counters.get((op, number))) for number, kernel in enumerate(node.kernels)),
        )
        for op, node in enumerate(trace.ops)
    )
    return msgspec.structs.replace(trace, ops=ops)


def _counted(kernel: Kernel, counters: Counters | None) -> Kernel:
    return kernel if counters is None else msgspec.structs.replace(kernel, counters=counters)


def _shape(name: str, grid: Dim3, block: Dim3) -> str:
    return f"'{shown_name(name)}' with grid {'x'.join(map(str, grid))}, block {'x'.join(map(str, block))}"


def _dim3(text: str) -> Dim3:
    """Parse `(64, 8, 1)` or `(64 8 1)`."""
    x, y, z = (int(number) for number in re.findall(r"\d+", text))
    return x, y, z


def _number(text: str, unit: str, metric: str, launch: str) -> int:
    match = _UNIT.match(unit)
    if match is None:
        raise CaptureError(f"ncu gives '{metric}' in '{unit}', not in bytes or instructions")
    try:
        return round(float(text.replace(",", "")) * _FACTORS[match[1]])
    except (ValueError, OverflowError) as cause:
        raise CaptureError(f"ncu gives '{text}' for '{metric}' of launch {launch}, not a number") from cause


def _reason(text: str) -> str:
    """Return the line in which ncu, or the program, reports the error."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("==ERROR==")]
    return (errors or lines or ["no output"])[-1].removeprefix("==ERROR==").strip()
