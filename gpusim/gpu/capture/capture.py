"""`gpusim capture`: record a model's step as a trace and check it against the model."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import msgspec
import torch

from gpusim.formats.hardware import hardware_for_gpu
from gpusim.formats.trace import GroundTruth, HostLink, Timing, Trace
from gpusim.gpu.calibrate.copies import CopyBench, fastest_link, link, own_link
from gpusim.gpu.capture.calls import JointGraph
from gpusim.gpu.capture.eager import paced, time_eager
from gpusim.gpu.capture.joint_graph import joint_graph
from gpusim.gpu.capture.models import ModelStep, load_step
from gpusim.gpu.capture.options import CaptureOptions, Say, check_frontend
from gpusim.gpu.capture.rebuild import rebuild
from gpusim.gpu.capture.user_step import UserStep
from gpusim.gpu.capture.variants import with_variants
from gpusim.gpu.capture.workspaces import op_workspaces
from gpusim.gpu.device import explain_out_of_memory, gpu_facts, require_gpu, set_precision
from gpusim.gpu.isolate import alone
from gpusim.gpu.profiling import ProfiledOps, host_times, profile_ops
from gpusim.gpu.replay.cudagraph import GraphRecorder
from gpusim.gpu.replay.execute import InitialState, Runner, make_initial
from gpusim.gpu.replay.timing import time_typical
from gpusim.plan.schedule import Schedule
from gpusim.plan.sync import program_order_releases
from gpusim.trace.check import check_trace
from gpusim.trace.dependencies import dependencies


@dataclass(frozen=True)
class Captured:
    """A checked trace with its errors against the model, and the profile of one iteration."""

    trace: Trace
    loss_error: float
    gradient_error: float
    profile: ProfiledOps


@explain_out_of_memory
def capture(options: CaptureOptions, say: Say = lambda _: None) -> Captured:
    """Capture one step on the current GPU. Raises `CaptureError` for a failed check, `GpuError` without a GPU."""
    device = require_gpu()
    check_frontend(options)
    set_precision(options.dtype)
    say("building the model")
    step = build_step(options, device)
    say("recording its operators")
    return capture_recorded(step, joint_graph(step), options, device, say)


def capture_recorded(
    step: ModelStep | UserStep, graph: JointGraph, options: CaptureOptions, device: torch.device, say: Say
) -> Captured:
    """Check a recorded step, then time and profile it on the GPU."""
    say("checking the rebuilt step against the model")
    rebuilt = rebuild(step, graph, options, device)
    trace, initial = rebuilt.trace, rebuilt.recorded.initial
    say("timing the eager step")
    eager = time_eager(step)
    runner = Runner(trace, device, trust_code=True)
    state = InitialState.copy_of(initial)
    runner.bind(state.tensors)
    releases = program_order_releases(trace)
    say("timing the host's calls")
    issue_ns = host_times(runner, state, releases)
    host_ns = paced(trace, issue_ns, eager.pace)
    n = len(trace.ops)
    gpu = gpu_facts(GraphRecorder(runner, dependencies(trace)).record(Schedule.in_recorded_order(n), warm=True).replay)
    state.restore()
    workspaces = op_workspaces(runner, state, releases)
    say("profiling its kernels")
    profile = profile_ops(runner, state, releases, sum(issue_ns))  # issued one by one, not at the eager pace
    loss_error, gradient_error = rebuilt.loss_error, rebuilt.gradient_error
    del runner, state, rebuilt, graph, initial
    say("timing the sequential CUDA graph, rebuilt from the trace")
    graph_time, host_link = alone(time_sequential, trace, options.seed)
    hardware = hardware_for_gpu(gpu.name)
    if hardware is not None and hardware.calibrated:  # a data sheet has the rates of the bus
        host_link = fastest_link(host_link, hardware.copies, partial(alone, own_link))
    truth = GroundTruth(
        eager=eager.wall,
        graph=graph_time,
        attributed_frac=profile.attributed_frac,
        unattributed=profile.unattributed,
        link=host_link,
    )
    ops = tuple(
        msgspec.structs.replace(op, host_ns=host, kernels=kernels, workspace_bytes=workspace)
        for op, host, kernels, workspace in zip(trace.ops, host_ns, profile.kernels, workspaces, strict=True)
    )
    provenance = msgspec.structs.replace(trace.provenance, gpu=gpu)
    trace = msgspec.structs.replace(trace, provenance=provenance, ops=ops, ground_truth=truth)
    if options.variants:
        trace = with_variants(trace, options.seed, say)
    check_trace(trace, options.spec)
    return Captured(trace, loss_error, gradient_error, profile)


def time_sequential(trace: Trace, seed: int) -> tuple[Timing, HostLink | None]:
    """Return the time of the sequential CUDA graph, rebuilt from the trace alone as in a replay.

    For a step in training also the link to the host, which memory plans use. Call it in a process of its own. The
    addresses of a graph's tensors change its time at batch 1, and the model's own tensors would shift them.
    """
    device = require_gpu()
    set_precision(trace.model.dtype)
    runner = Runner(trace, device, trust_code=True)
    runner.bind(make_initial(trace, device, seed).tensors)
    recorder = GraphRecorder(runner, dependencies(trace))
    n = len(trace.ops)
    alone = Schedule.in_recorded_order(n)
    recorder.record(alone, warm=True)
    timing = time_typical({"graph": lambda: recorder.record(alone)})["graph"]
    return timing, link(CopyBench()) if trace.model.mode == "train" else None


def build_step(options: CaptureOptions, device: torch.device) -> ModelStep:
    """Build the model of the options on the device."""
    return load_step(
        options.spec,
        mode=options.mode,
        batch=options.batch,
        dtype=options.dtype,
        memory_format=options.memory_format,
        device=device,
        seed=options.seed,
    )
