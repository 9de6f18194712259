"""Findings on a Kineto file: wrong or missing data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from gpusim.importers.model import GpuFacts, Profile
from gpusim.text import shortened
from gpusim.units import clause

#: Share of the kernels' time without an operator above which a finding warns.
MAX_UNATTRIBUTED: Final = 0.001
#: Launches without a kernel that do not count as loss: the profile may begin or end between the two.
MAX_UNSEEN: Final = 2


@dataclass(frozen=True, slots=True)
class Counts:
    """Counts from reading the events."""

    launches: int
    """Calls that start a kernel."""
    out_of_range: int
    """Events without a valid time."""
    negative: int
    """Events with a negative duration."""
    others: tuple[str, ...]
    """Other accelerators with records."""
    mended: bool
    """Whether parts of the file were invalid JSON and read leniently."""


def find(profile: Profile, counts: Counts) -> None:
    """Add the findings to the profile, whose records are linked."""
    if counts.others:
        text = f"records of another accelerator ({', '.join(counts.others)}) are in the file and are not read"
        profile.note("other-accelerator", text, "gpusim reads the records of NVIDIA and AMD GPUs")
    if counts.mended:
        text = "it is not strict JSON (nan, inf, control characters, wrong escapes or encoding) and is read leniently"
        profile.note("not-strict-json", text, "names of kernels may differ; a current PyTorch writes strict JSON")
    if counts.out_of_range or counts.negative:
        out = clause(counts.out_of_range, "event", "has no valid time and is", "have no valid time and are")
        negative = clause(counts.negative, "event", "has", "have")
        texts = (
            (counts.out_of_range, f"{out} left out"),
            (counts.negative, f"{negative} a negative duration, taken as 0"),
        )
        profile.note("odd-times", "; ".join(text for count, text in texts if count), "profile again")
    if profile.activities:
        _about_gpus(profile)
        _about_launches(profile, counts.launches)


def _about_gpus(profile: Profile) -> None:
    kernels = profile.kernels()
    if profile.resolution_ns > 1:
        text = "all times are whole microseconds: a kernel's time is right to ±1 µs"
        profile.note("integer-microseconds", text, "profile with PyTorch 2.3 or later, which writes nanoseconds")
    if kernels and all(kernel.regs_per_thread is None for kernel in kernels):
        amd = any("AMD" in gpu.name or "MI" in gpu.name for gpu in profile.gpus.values()) or "HIP" in profile.writer
        who = "AMD's profiler records no registers and no shared memory" if amd else "no kernel has its registers"
        action = "numbers of concurrent kernels are upper bounds" if amd else "profile with a current PyTorch"
        profile.note("no-registers", f"{who}: occupancy is unknown", action)
    missing = [device for device in profile.devices() if not profile.gpus.get(device, GpuFacts()).name]
    if missing:
        devices = shortened(", ".join(map(str, missing)))
        profile.note("no-gpu-properties", f"the file does not name the GPU (device {devices})", "name it with --gpu")


def _about_launches(profile: Profile, launches: int) -> None:
    kernels = profile.kernels()
    if kernels and profile.nodes:
        lost_ns = sum(kernel.dur_ns for kernel in kernels if not kernel.op)
        share = lost_ns / max(1, sum(kernel.dur_ns for kernel in kernels))
        if share > MAX_UNATTRIBUTED:
            text = f"{share:.1%} of the kernels' time belongs to no operator"
            profile.note("unattributed-time", text, "profile with activities=[CPU, CUDA] from before the step begins")
    shared = [kernel for kernel in kernels if kernel.shared_launch]
    calls = len({kernel.correlation for kernel in shared})
    if shared:
        text = (
            f"{len(shared)} kernels share {calls} launches, of CUDA graphs or of calls that start several: they have "
            "no launch of their own, and those of graphs no operator"
        )
        profile.note("shared-correlation", text, "add a dump of the graph for its edges")
    unlaunched = sum(kernel.launch_ns is None for kernel in kernels)
    if unlaunched:
        text = f"{unlaunched} of {len(kernels)} kernels have no launch in the file"
        profile.note("no-launches", text, "profile the CPU, too (ProfilerActivity.CPU)")
    seen = sum(not kernel.shared_launch and kernel.launch_ns is not None for kernel in kernels) + calls
    if launches > seen + MAX_UNSEEN:
        text = (
            f"the file has {launches} launches and kernels of {seen}: records were dropped, or the profile ended "
            "before the kernels did"
        )
        profile.note("dropped-events", text, "synchronize before the profiler stops, and profile fewer steps")
