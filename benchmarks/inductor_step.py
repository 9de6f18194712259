"""One step with Inductor's kernels under several policies, against torch.compile in one CUDA graph. Needs a GPU.

    python benchmarks/inductor_step.py torchvision:googlenet train 8 --style apart --accuracy

`--accuracy` compares the loss and the gradients of ATen's calls, of Inductor's kernels and of torch.compile with those
of a step in double precision.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec
import torch

from gpusim.api.predict import simulate
from gpusim.api.resolve import resolve_schedule
from gpusim.formats.trace import Kernel, Trace
from gpusim.gpu.capture.capture import build_step
from gpusim.gpu.capture.joint_graph import LEARNING_RATE, MOMENTUM, joint_graph
from gpusim.gpu.capture.models import ModelStep
from gpusim.gpu.capture.options import CaptureOptions
from gpusim.gpu.capture.rebuild import bare_trace
from gpusim.gpu.capture.record import Recorded, record
from gpusim.gpu.device import gpu_facts, precision, require_gpu, set_precision
from gpusim.gpu.inductor.step import inductor_step, with_values
from gpusim.gpu.profiling import host_times, profile_ops
from gpusim.gpu.replay.cudagraph import GraphRecorder
from gpusim.gpu.replay.execute import InitialState, Runner
from gpusim.gpu.replay.timing import Recording, time_typical
from gpusim.plan.schedule import Schedule
from gpusim.plan.sync import program_order_releases
from gpusim.step import load
from gpusim.trace.dependencies import dependencies

BEGIN = time.perf_counter()


def say(*words: object) -> None:
    print(f"[{time.perf_counter() - BEGIN:6.1f}]", *words, flush=True)


class OwnGraph:
    """torch.compile's step in one CUDA graph, optimizer included."""

    peak_bytes = 0

    def __init__(self, step: ModelStep) -> None:
        self.module = copy.deepcopy(step.module)
        model = torch.compile(self.module)
        if step.loss is None:
            with torch.no_grad():
                self._record(lambda: model(*step.inputs))
            return
        optimizer = torch.optim.SGD(self.module.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)
        loss_function = step.loss

        def run() -> None:
            optimizer.zero_grad(set_to_none=True)
            loss_function(model(*step.inputs), step.target).backward()
            optimizer.step()

        self._record(run)

    def _record(self, run: Any) -> None:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(4):
                run()
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.result = run()

    def replay(self) -> None:
        self.graph.replay()


def gradients_of(step: ModelStep, module: torch.nn.Module, model: Any, double: bool) -> list[torch.Tensor]:
    """Return loss and gradients, in double precision."""
    assert step.loss is not None
    module.zero_grad(set_to_none=True)
    inputs = [x.double() if double and x.is_floating_point() else x for x in step.inputs]
    loss = step.loss(model(*inputs), step.target)
    loss.backward()
    return [loss.detach().double(), *(p.grad.double().clone() for p in module.parameters() if p.grad is not None)]


def accuracy(step: ModelStep, graph: Any, trace: Trace, fused: Any, options: CaptureOptions) -> None:
    """Print the errors of loss and gradients against a step in double precision."""
    device = torch.device("cuda")
    runner = Runner(trace, device, own=True)
    releases = program_order_releases(trace)
    for dtype in dict.fromkeys(("fp32", options.dtype)):
        with precision(dtype):
            torch.manual_seed(options.seed)
            recorded = record(graph)
            values = with_values(fused, recorded)
            runner.bind(InitialState.copy_of(values.initial).tensors)
            torch.manual_seed(options.seed)
            runner.run_in_order(releases)
            begun = {recorded.tensors[i].name: recorded.initial[i] for i in recorded.named}
            module = copy.deepcopy(step.module)
            module.load_state_dict({n: begun.get(n, t) for n, t in module.state_dict().items()})
            steps = {
                "aten": [recorded.final[i].double() for i in (*recorded.outputs, *recorded.gradients)],
                "fused": [runner.tensors[i].double().clone() for i in (*fused.outputs, *fused.gradients)],
                "compile": gradients_of(step, (m := copy.deepcopy(module)), torch.compile(m), False),
            }
            exact = gradients_of(step, (m := copy.deepcopy(module).double()), m, True)
            runner.drop_temporaries()
        norms = [tensor.norm().item() for tensor in exact]
        for name, tensors in steps.items():
            apart = [(f - e).norm().item() for f, e in zip(tensors, exact, strict=True)]
            each = [a / n for a, n in zip(apart, norms, strict=True) if n > 1e-3 * max(norms)]
            whole = (sum(a * a for a in apart[1:]) / sum(n * n for n in norms[1:])) ** 0.5
            gradients = f"gradients {whole:.2e}, worst {max(each[1:]):.2e}, first {each[1]:.2e}"
            say(f"{dtype} {name}: loss {each[0]:.1e}, {gradients}")


@dataclass
class Measured:
    """A step with Inductor's kernels, profiled: what records each schedule, and facts on its kernels."""

    recorders: dict[str, Callable[[], Recording]] = field(default_factory=dict)
    predicted_us: dict[str, float] = field(default_factory=dict)
    kernels: list[Kernel] = field(default_factory=list)


def profiled(trace: Trace, fused: Recorded, policies: Sequence[str]) -> Measured:
    """Profile a step's kernels, and record its sequential schedule and those of the policies once each."""
    device = torch.device("cuda")
    runner = Runner(trace, device, own=True)
    state = InitialState.copy_of(fused.initial)
    runner.bind(state.tensors)
    releases = program_order_releases(trace)
    host_ns = host_times(runner, state, releases)
    kernels = profile_ops(runner, state, releases, sum(host_ns)).kernels
    ops = tuple(msgspec.structs.replace(op, kernels=each) for op, each in zip(trace.ops, kernels, strict=True))
    facts = gpu_facts(lambda: runner.run_in_order(releases))
    provenance = msgspec.structs.replace(trace.provenance, gpu=facts)
    loaded = load(msgspec.structs.replace(trace, ops=ops, provenance=provenance))
    found = Measured(kernels=[kernel for each in kernels for kernel in each])
    total_us = sum(kernel.dur_ns for kernel in found.kernels) / 1e3
    say(f"{len(ops)} ops, {len(found.kernels)} kernels, {total_us:.0f} us in all")
    recorder = GraphRecorder(runner, dependencies(trace))
    schedules = {"sequential": Schedule.in_recorded_order(len(ops))}
    for policy in policies:
        name, _, streams = policy.partition(":")
        schedules[policy] = resolve_schedule(loaded, name, int(streams))
    for name, schedule in schedules.items():
        recorder.record(schedule, warm=True)
        found.recorders[name] = partial(recorder.record, schedule)
        found.predicted_us[name] = round(simulate(loaded, schedule).makespan_ns / 1e3, 1)
    return found


def measured(step: ModelStep, trace: Trace, fused: Recorded, policies: list[str], baseline: bool) -> None:
    """Print predicted and measured times of schedules, with torch.compile in one CUDA graph as baseline."""
    found = profiled(trace, fused, policies)
    contenders: dict[str, Any] = {"own_graph": partial(OwnGraph, step)} if baseline else {}
    for name, timing in time_typical(contenders | found.recorders, 2, 9).items():
        row = {"name": name, "us": round(timing.median_ns / 1e3, 1), "predicted_us": found.predicted_us.get(name)}
        print(json.dumps(row), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("spec")
    parser.add_argument("mode", choices=("infer", "train"))
    parser.add_argument("batch", type=int)
    parser.add_argument("--dtype", default="tf32")
    parser.add_argument("--memory-format", default="contiguous")
    parser.add_argument("--style", default="default")
    parser.add_argument("--policies", nargs="*", default=["critical_path:4", "critical_path:8", "torchsched:3"])
    parser.add_argument("--accuracy", action="store_true")
    parser.add_argument("--no-baseline", action="store_true")
    given = parser.parse_args()
    device = require_gpu()
    options = CaptureOptions(
        given.spec, given.mode, given.batch, given.dtype, given.memory_format, "inductor", given.style, command="step"
    )
    set_precision(options.dtype)
    step = build_step(options, device)
    graph = joint_graph(step)
    torch.manual_seed(0)
    recorded = record(graph)
    say("recorded")
    fused = inductor_step(graph, recorded, options.mode == "train", options.style)
    trace = bare_trace(options, step, fused)
    say("compiled")
    if given.accuracy:
        accuracy(step, graph, trace, fused, options)
    measured(step, trace, fused, given.policies, not given.no_baseline)


if __name__ == "__main__":
    main()
