"""Time of a kernel on another GPU, from its measured time on the GPU of its capture.

The measured time has three shares. The time of its DRAM traffic at the source's bandwidth scales with bandwidth. The
time of its arithmetic at the peak of the SMs that its blocks use scales with that peak. The rest is latency, issue and
caches, and scales with the SM clock and the number of waves. So a small kernel does not pay for tensor cores that it
never filled.

    time = measured x (memory share x bandwidths + compute share x peaks + rest x clocks x waves)

Each factor is the source's value over the target's, except waves: the target's over the source's.

Source: the idea of waves is Habitat's (Yu et al., ATC 2021); the shares are those of a roofline (Williams et al., CACM
2009), taken one after the other. Against throughputs that others published of V100, A100 and RTX 4090
(research/data/other_gpus.md): median factor 1.21, largest 1.53. Constants: `Memory.dram_bytes_per_ns`, `Rates`,
`Limits.sms`.
"""

from __future__ import annotations

from typing import Final

from gpusim.formats.hardware import HardwareModel, Memory

#: FP32 multiply-adds that an SM starts per cycle, by compute capability. Source: CUDA C++ Programming Guide, table
#: "Throughput of Native Arithmetic Instructions", row "32-bit floating-point add, multiply, multiply-add".
FP32_LANES: Final = {
    "3.5": 192, "3.7": 192, "5.0": 128, "5.2": 128, "6.0": 64, "6.1": 128, "7.0": 64, "7.5": 64, "8.0": 64,
}  # fmt: skip
#: The same from compute capability 8.6 on.
NEWER_FP32_LANES: Final = 128


def clock_ghz(hardware: HardwareModel) -> float:
    """Return the SM clock behind the data sheet's FP32 peak, in GHz: two operations per lane and cycle."""
    lanes = FP32_LANES.get(hardware.limits.compute_capability, NEWER_FP32_LANES)
    return hardware.rates.fp32 / (2 * lanes * hardware.limits.sms)


def reached_rate(peak: float, blocks: int, sms: int) -> float:
    """Return the peak of the SMs that `blocks` blocks use."""
    return peak * min(1.0, blocks / sms)


def waves(blocks: int, blocks_per_sm: int, sms: int) -> float:
    """Return the number of times a kernel fills the GPU, at least 1."""
    return max(1.0, blocks / (blocks_per_sm * sms))


def scaled_ns(
    measured_ns: float,
    source: Memory,
    target: Memory,
    dram_bytes: float,
    more_dram_bytes: float,
    flops: float,
    source_rate: float,
    target_rate: float,
    clocks: float,
    waves: float,
) -> float:
    """Return the time on the target in ns; rates come from `reached_rate`, `clocks` and `waves` are the factors above.

    `dram_bytes` is the traffic on the source, `more_dram_bytes` the traffic that hits only in the source's L2 cache.
    """
    memory = min(1.0, dram_bytes / source.dram_bytes_per_ns / measured_ns)
    bandwidths = source.dram_bytes_per_ns / target.dram_bytes_per_ns
    compute = min(1.0 - memory, flops / source_rate / measured_ns)
    rest = (1.0 - memory - compute) * clocks * waves
    scaled = measured_ns * (memory * bandwidths + compute * source_rate / target_rate + rest)
    least = measured_ns * memory * bandwidths + more_dram_bytes / target.dram_bytes_per_ns
    return max(scaled, least)
