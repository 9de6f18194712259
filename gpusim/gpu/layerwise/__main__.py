"""One rank: `torchrun --nproc-per-node 4 -m gpusim.gpu.layerwise TRACE --plan PLAN`; with `--ranks 4`, four of them.

The network is taken from a captured step, with random weights and a random batch. Compares loss and gradients with one
device, statistics of BatchNorm synchronised, then times steps, on GPUs also as a CUDA graph. What differs in single
precision is compared again in double: deep networks with random weights amplify rounding. Rank 0 prints one JSON
document.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from math import inf
from pathlib import Path
from typing import Final, NoReturn

import torch
import torch.distributed as dist

from gpusim.defaults import BATCH_NORMS, DEFAULT_BATCH_NORM
from gpusim.errors import EXIT_INTERRUPTED, EXIT_USER_ERROR, GpuError, GpusimError, OptionError
from gpusim.formats.topology import check_gpus, default_topology
from gpusim.gpu.layerwise.batch import Data, make_data
from gpusim.gpu.layerwise.check import compare_plan
from gpusim.gpu.layerwise.launch import end_with_starter, launch
from gpusim.gpu.layerwise.layer_times import layer_documents, time_layers
from gpusim.gpu.layerwise.rank import Rank
from gpusim.gpu.layerwise.recorded import recorded
from gpusim.gpu.layerwise.sharing import groups_of
from gpusim.gpu.layerwise.transport import TIMEOUT, Distributed
from gpusim.io.file_limits import MAX_NODE_GPUS
from gpusim.layerwise.compute import TraceTimes
from gpusim.layerwise.costs import Problem
from gpusim.layerwise.fixed_plans import FIXED_PLANS, Choice
from gpusim.layerwise.from_trace import layers_of
from gpusim.layerwise.layers import LayerGraph
from gpusim.layerwise.plans import GivenPlan, plan_reader
from gpusim.step import load
from gpusim.text import shortened, visible

_WARM_UP: Final = 3
#: Steps of which `--layers` takes the medians, unless `--steps` says how many.
_LAYER_STEPS: Final = 5


def main(arguments: list[str] | None = None) -> int:
    """Run this process's rank and return the exit status."""
    parser = argparse.ArgumentParser(prog="gpusim.gpu.layerwise", description=__doc__)
    parser.add_argument("trace")
    parser.add_argument("--plan", required=True, help="a plan file, or data, model, owt")
    parser.add_argument("--steps", type=int, default=0, help="steps to time")
    parser.add_argument(
        "--layers", action="store_true", help="time each layer, too, and compare it with its prediction"
    )
    parser.add_argument(
        "--batch-norm", choices=BATCH_NORMS, default=DEFAULT_BATCH_NORM, help="of timed steps [default: %(default)s]"
    )
    parser.add_argument("--dtype", choices=("float32", "float64"), default="float32")
    parser.add_argument("--ranks", type=int, metavar="N", help="start N ranks on this machine, without torchrun")
    options = parser.parse_args(arguments)
    if options.steps < 0:
        parser.error(f"--steps {options.steps}: 0 or more")
    try:
        if options.ranks is not None:
            sys.stdout.write(_start_ranks(options))
            return 0
        join()
        document = run(options)
        if dist.get_rank() == 0:
            sys.stdout.write(json.dumps(document) + "\n")
    except GpusimError as error:
        sys.stderr.write(f"gpusim: {error}\n")
        return EXIT_USER_ERROR
    except KeyboardInterrupt:
        sys.stderr.write("gpusim: interrupted\n")
        return EXIT_INTERRUPTED
    except (dist.DistError, RuntimeError) as error:
        if not isinstance(error, dist.DistError) and "gloo" not in str(error):
            raise
        reason = shortened(visible(str(error).partition("\n")[0]))
        sys.stderr.write(f"gpusim: an exchange with the other ranks failed: {reason}\n")
        return EXIT_USER_ERROR
    return 0


def _start_ranks(options: argparse.Namespace) -> str:
    """Start the ranks as processes, and return what rank 0 prints."""
    if not 1 <= options.ranks <= MAX_NODE_GPUS:
        raise OptionError(f"--ranks is {options.ranks}: give a number from 1 to {MAX_NODE_GPUS}")
    words = [options.trace, "--plan", options.plan, "--steps", str(options.steps)]
    words += ["--batch-norm", options.batch_norm, "--dtype", options.dtype, *(["--layers"] if options.layers else [])]
    return launch(options.ranks, "gpusim.gpu.layerwise", words, timeout_s=inf)


def join() -> torch.device:
    """Join the ranks of this run, by NCCL if each has a GPU, else by gloo; returns the rank's device."""
    rank, gpus = _number("RANK"), _number("WORLD_SIZE")
    if rank >= gpus:
        raise OptionError(f"RANK is {rank} and WORLD_SIZE {gpus}: start the ranks with torchrun")
    local = _number("LOCAL_RANK", rank)
    on_gpus = torch.cuda.device_count() > local
    device = torch.device("cuda", local) if on_gpus else torch.device("cpu")
    if on_gpus:
        torch.cuda.set_device(device)
    store = os.environ.get("GPUSIM_RANKS_FILE")
    if store:
        end_with_starter()
    try:
        dist.init_process_group(
            "nccl" if on_gpus else "gloo",
            init_method=f"file://{store}" if store else "env://",
            rank=rank,
            world_size=gpus,
            timeout=TIMEOUT,
        )
    except (dist.DistError, ValueError) as cause:  # a rank that never came, or an address that is none
        reason = shortened(visible(str(cause).partition("\n")[0]))
        raise GpuError(f"rank {rank} of {gpus} did not meet the others: {reason}") from cause
    return device


def _number(name: str, default: int | None = None) -> int:
    """Return a number that torchrun sets in the environment."""
    text = os.environ.get(name)
    if text is None and default is not None:
        return default
    if text is None:
        raise OptionError(f"{name} is not set: start the ranks with torchrun")
    if not text.isdecimal():
        raise OptionError(f"{name}='{shortened(visible(text))}' is no number: start the ranks with torchrun")
    return int(text)


def leave(status: int) -> NoReturn:
    """Leave the process group and end this process with an exit status.

    Skips the interpreter's shutdown: a gloo thread that frees a tensor during it aborts the process (SIGABRT, 3 of 12
    runs of two ranks; torch 2.13.0, Python 3.11).
    """
    if dist.is_initialized():
        dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def run(options: argparse.Namespace) -> dict[str, object]:
    """Check the plan, then time it; returns the results."""
    gpus = dist.get_world_size()
    on_gpus = dist.get_backend() == "nccl"
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpus else torch.device("cpu")
    step = load(options.trace)
    layers = layers_of(step.trace, step.file)
    if not layers.training or all(layer.kind != "loss" for layer in layers.layers):
        raise OptionError(f"'{step.trace.name}' is no training step with a loss: nothing to compare")
    graph = layers.for_gpus(gpus)
    given = _given(graph, options.plan, gpus)
    choice = given.choice
    dtype = torch.float64 if options.dtype == "float64" else torch.float32
    compared = _compare(graph, choice, device, dtype)
    notes = list(given.notes)
    if not compared["outputs_equal"] and dtype != torch.float64:
        notes.append(
            f"in {options.dtype} gradients differ by {compared['gradient_difference']:.1e}: compared in float64"
        )
        compared = _compare(graph, choice, device, torch.float64)
    document: dict[str, object] = {
        "network": graph.name,
        "gpus": gpus,
        "backend": dist.get_backend(),
        "plan": Path(options.plan).name,
        **compared,
        "batch_norm": options.batch_norm,
        "notes": notes,
        "steps_ns": [],
        "graph_steps_ns": [],
    }
    if options.steps or options.layers:
        transport = Distributed(groups_of(graph, choice, gpus, options.batch_norm))
        rank = Rank(graph, choice, gpus, transport, device=device, dtype=dtype, batch_norm=options.batch_norm)
        data = make_data(graph, 0, dtype, device)
        if options.steps:
            document |= _times(rank, data, options.steps)
    if options.layers:
        topology = default_topology(step.hardware)
        check_gpus(topology, gpus)
        times = TraceTimes(step.graph, layers)
        problem = Problem(graph, gpus, topology, times, step.hardware, options.batch_norm)
        measured_ns = time_layers(rank, data, gpus, options.steps or _LAYER_STEPS)
        document["predicted_on"] = step.hardware.name
        document["layers"] = layer_documents(problem, choice, measured_ns)
    return document


def _compare(graph: LayerGraph, choice: Choice, device: torch.device, dtype: torch.dtype) -> dict[str, object]:
    """Compare with one device; differences are the largest of all ranks, so that these agree."""
    compared = compare_plan(graph, choice, dist.get_world_size(), device=device, dtype=dtype)
    worst = torch.tensor(
        [compared.gradient_difference, compared.loss_difference, float(not compared.equal)], device=device
    )
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    return {
        "compared_in": str(dtype).removeprefix("torch."),
        "loss": compared.loss,
        "gradient_difference": float(worst[0]),
        "loss_difference": float(worst[1]),
        "outputs_equal": not bool(worst[2]),
    }


def _given(graph: LayerGraph, plan: str, gpus: int) -> GivenPlan:
    if plan in FIXED_PLANS:
        return GivenPlan(FIXED_PLANS[plan](graph, gpus))
    if plan == "layer" and not Path(plan).exists():
        raise OptionError("--plan layer: give the file that `gpusim parallel TRACE --gpus N -o FILE` writes")
    return plan_reader(Path(plan), gpus)(graph)


def _times(rank: Rank, data: Data, steps: int) -> dict[str, object]:
    """Return times of steps launched one kernel at a time, and as a CUDA graph where NCCL and the GPU allow one."""

    def step() -> None:
        rank.clear()
        rank.step(data)

    times: dict[str, object] = {"steps_ns": _timed(step, rank.device, steps)}
    replay, problem = recorded(step, rank.device, generator=rank.generator)
    if replay is not None:
        times["graph_steps_ns"] = _timed(replay, rank.device, steps)
    elif rank.device.type == "cuda":
        times["no_graph"] = problem
    return times


def _timed(run: Callable[[], None], device: torch.device, steps: int) -> list[int]:
    """Wall times of steps on this rank in ns; all ranks start each step together."""
    times_ns = []
    for number in range(_WARM_UP + steps):
        dist.barrier()
        _synchronise(device)
        begin = time.perf_counter_ns()
        run()
        _synchronise(device)
        if number >= _WARM_UP:
            times_ns.append(time.perf_counter_ns() - begin)
    return times_ns


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    leave(main())
