"""Time of a kernel on a GPU that it was not captured on, from what it achieves on the one it was captured on.

Its measured time has three shares. What its DRAM traffic takes at the source's bandwidth scales with bandwidth. What
its arithmetic takes at the peak of the SMs that its blocks reach scales with that peak. The rest is latency, issue and
caches: it scales with the SM clock and the number of waves. So a small kernel does not pay for tensor cores that it
never filled.

    time = measured x (memory share x bandwidths + compute share x peaks + rest x clocks x waves)

each factor being the source's value over the target's; of waves, the target's over the source's.

Source: the idea of waves is Habitat's (Yu et al., ATC 2021); the shares are those of a roofline (Williams et al., CACM
2009), taken one after the other. Against throughputs that others published of V100, A100 and RTX 4090
(validate/results/other_gpus.md): median factor 1.21, largest 1.53. Constants: `Memory.dram_bytes_per_ns`, `Rates`,
`Limits.sms`.
"""

from __future__ import annotations

from typing import Final

from gpusim.formats.hardware import HardwareModel, Memory

#: FP32 multiply-adds an SM starts in a clock cycle, by compute capability. Source: CUDA C++ Programming Guide, table
#: "Throughput of Native Arithmetic Instructions", row "32-bit floating-point add, multiply, multiply-add".
FP32_LANES: Final = {
    "3.5": 192, "3.7": 192, "5.0": 128, "5.2": 128, "6.0": 64, "6.1": 128, "7.0": 64, "7.5": 64, "8.0": 64,
}  # fmt: skip
#: From compute capability 8.6 on.
NEWER_FP32_LANES: Final = 128


def clock_ghz(hardware: HardwareModel) -> float:
    """The SM clock that the data sheet's FP32 peak stands for: two operations a lane and cycle."""
    lanes = FP32_LANES.get(hardware.limits.compute_capability, NEWER_FP32_LANES)
    return hardware.rates.fp32 / (2 * lanes * hardware.limits.sms)


def reached_rate(peak: float, blocks: int, sms: int) -> float:
    """Peak of the SMs that so many blocks reach."""
    return peak * min(1.0, blocks / sms)


def waves(blocks: int, blocks_per_sm: int, sms: int) -> float:
    """How many times over a kernel fills the GPU, at least once."""
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
    """Time on the target; rates are those of `reached_rate`, `clocks` and `waves` the factors above.

    `dram_bytes` is the traffic on the source, `more_dram_bytes` what its L2 cache holds and the target's does not.
    """
    memory = min(1.0, dram_bytes / source.dram_bytes_per_ns / measured_ns)
    bandwidths = source.dram_bytes_per_ns / target.dram_bytes_per_ns
    compute = min(1.0 - memory, flops / source_rate / measured_ns)
    rest = (1.0 - memory - compute) * clocks * waves
    scaled = measured_ns * (memory * bandwidths + compute * source_rate / target_rate + rest)
    least = measured_ns * memory * bandwidths + more_dram_bytes / target.dram_bytes_per_ns
    return max(scaled, least)
