"""The driver's shared memory carve-outs, and kernels that share SMs, compared with an H200.

`smem_splits_h200.csv`: Nsight Compute's launch__shared_mem_config_size of made-up kernels;
`smem_splits_libraries_h200.csv`: of the kernels of GoogLeNet, inference 1 and training 8, both TF32.
`smem_joins_h200.csv`: a kernel of 132 blocks on 132 SMs, and on how many of them blocks of a second one ran beside it.
One NVIDIA H200, driver 580.159.04, CUDA 13.0, 2026-11-21.
"""

from __future__ import annotations

import csv
from pathlib import Path

import msgspec

from gpusim.formats.hardware import load_hardware
from gpusim.formats.trace import Counters, Kernel
from gpusim.gpu.calibrate.dispatcher_rules import HOLD_REGS, joins
from gpusim.rules.occupancy import Footprint, kernel_footprint
from gpusim.units import KIB

DATA = Path(__file__).parents[1] / "data"
LIMITS = load_hardware("h200").limits


def rows(name: str) -> list[dict[str, int]]:
    with (DATA / name).open(newline="") as file:
        return [{key: int(value) for key, value in row.items()} for row in csv.DictReader(file)]


def footprint(threads: int, smem_bytes: int, regs: int = HOLD_REGS) -> Footprint:
    return kernel_footprint(
        LIMITS, Kernel(name="k", dur_ns=1, block=(threads, 1, 1), regs_per_thread=regs, smem_bytes=smem_bytes)
    )


def test_driver_sets_shared_memory_as_the_rule_says() -> None:
    tested = rows("smem_splits_h200.csv")
    assert len(tested) == 270
    wrong = [
        row
        for row in tested
        if footprint(row["threads"], row["smem_bytes"], row["regs_per_thread"]).own_carveout_bytes != row["split_bytes"]
    ]
    assert not wrong


def test_libraries_kernels_get_the_size_that_the_rule_says() -> None:
    """All but two kernels (4 of 1,070 launches), for which cuDNN and CUTLASS request another size."""
    with (DATA / "smem_splits_libraries_h200.csv").open(newline="") as file:
        tested = list(csv.DictReader(file))
    assert sum(int(row["launches"]) for row in tested) == 1070
    wrong = []
    for row in tested:
        block, split_bytes = (int(row["threads"]), 1, 1), int(row["split_bytes"])
        kernel = Kernel(
            name=row["name"],
            dur_ns=1,
            block=block,
            regs_per_thread=int(row["regs_per_thread"]),
            smem_bytes=int(row["smem_bytes"]),
        )
        if kernel_footprint(LIMITS, kernel).own_carveout_bytes != split_bytes:
            wrong.append((row["name"][:36], int(row["launches"])))
        counters = Counters(
            dram_bytes=0, l2_bytes=0, instructions=0, tensor_instructions=0, smem_config_bytes=split_bytes
        )
        counted = msgspec.structs.replace(kernel, counters=counters)
        assert kernel_footprint(LIMITS, counted).own_carveout_bytes == split_bytes
    assert wrong == [("void cutlass::Kernel2<cutlass_80_ten", 3), ("void implicit_convolve_sgemm<float; ", 1)]


def test_blocks_join_sms_as_the_rule_says() -> None:
    """On at least 100 of 132 SMs, or only on those that were empty."""
    tested = rows("smem_joins_h200.csv")
    assert len(tested) == 625
    wrong = []
    for row in tested:
        first = footprint(row["first_threads"], row["first_smem_kib"] * KIB)
        second = footprint(row["second_threads"], row["second_smem_kib"] * KIB)
        if joins(first, second, LIMITS) != (row["shared_sms"] >= 100):
            wrong.append(row)
    assert not wrong
