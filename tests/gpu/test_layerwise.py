"""Plans on real ranks: gloo on CPUs, every kind of layer and split, against one device; and a failing rank.

Each launch starts processes that import torch, so all that a number of ranks computes shares one.
"""

from __future__ import annotations

import importlib
import inspect
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

import gpusim
from gpusim.cli.parallel import parallel
from gpusim.defaults import DEFAULT_BATCH_NORM
from gpusim.errors import GpuError, OptionError
from gpusim.formats.hardware import load_hardware
from gpusim.formats.topology import default_topology, load_topology
from gpusim.gpu.calibrate.collectives import COLLECTIVES, measure_collectives
from gpusim.gpu.capture.estimate import capture_estimated
from gpusim.gpu.capture.options import CaptureOptions
from gpusim.gpu.layerwise import __main__ as layerwise
from gpusim.gpu.layerwise import check
from gpusim.gpu.layerwise.batch import make_data
from gpusim.gpu.layerwise.launch import launch
from gpusim.gpu.layerwise.one_device import run_on_one_device
from gpusim.gpu.layerwise.operations import Surroundings, parameters_of, run_layer
from gpusim.gpu.layerwise.pieces import pieces
from gpusim.gpu.layerwise.rank import Rank, groups_of
from gpusim.gpu.layerwise.sharing import sharing
from gpusim.gpu.layerwise.transport import Alone, Groups
from gpusim.layerwise.buckets import Bucket, gradient_buckets
from gpusim.layerwise.compute import Roofline
from gpusim.layerwise.configs import REPLICATED, Config, layer_configs
from gpusim.layerwise.costs import Problem
from gpusim.layerwise.fixed_plans import Choice, data_parallel
from gpusim.layerwise.layers import BATCH, LayerGraph
from gpusim.layerwise.lowering import lower_plan
from gpusim.layerwise.network_builder import NetworkBuilder
from gpusim.trace.store import write_trace
from tests.support.layer_networks import ROOT, chain, small_cnn

CPU = torch.device("cpu")
GATED = """
import torch
from torch import nn


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.gate, self.last = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 1), nn.Linear(8, 6)

    def forward(self, x):
        x = nn.functional.hardswish(self.stem(x))
        x = x * torch.sigmoid(self.gate(x.mean((2, 3), keepdim=True)))
        return self.last(x.mean((2, 3)))


def gated(batch):
    return Gated(), torch.randn(batch, 3, 9, 9)
"""


def start(gpus: int, *words: str, program: str = "rank", timeout_s: float = 300) -> str:
    """Run a program of `tests/support` on several ranks."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *([before] if before else [])])
    try:
        return launch(gpus, f"tests.support.{program}", words, timeout_s=timeout_s)
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


@pytest.fixture(scope="module")
def answers() -> dict[int, dict[str, Any]]:
    """What two and four ranks have found, by the number of ranks."""
    return {2: json.loads(start(2, "check", "local", "layers")), 4: json.loads(start(4, "check"))}


@pytest.mark.parametrize("gpus", [2, 4])
def test_every_kind_of_layer_and_split_computes_what_one_device_does(
    gpus: int, answers: dict[int, dict[str, Any]]
) -> None:
    """Loss and gradients in double precision. Each split of each layer occurs in at least one plan."""
    found = answers[gpus]["check"]
    assert found["plans"] > 12
    assert found["splits"] == found["possible_splits"]
    assert found["unequal"] == []
    assert found["worst"] < 1e-9


def test_local_statistics_are_those_of_each_part_of_the_batch(answers: dict[int, dict[str, Any]]) -> None:
    """On two ranks as if each had run its samples alone; parts of an image share statistics. Rounding is no error."""
    assert answers[2]["local"] == {"samples": True, "height": True, "bias_before_norm": True}


def test_each_layer_is_timed_on_each_rank_beside_its_prediction(answers: dict[int, dict[str, Any]]) -> None:
    """Rank 1 has no part of one convolution: nothing is computed there, and nothing predicted."""
    layers = {layer["name"]: layer for layer in answers[2]["layers"]["layers"]}
    assert len(layers) == len(small_cnn(1).layers)
    for pass_ in ("forward_ns", "backward_ns", "predicted_forward_ns", "predicted_backward_ns"):
        assert all(time > 0 for time in layers["stem"][pass_])
        assert layers["one"][pass_][0] > 0
    assert layers["one"]["forward_ns"][1] == 0
    assert layers["one"]["predicted_forward_ns"][1] == layers["one"]["predicted_backward_ns"][1] == 0
    assert layers["one"]["predicted_transfer_ns"] > 0 == layers["stem"]["predicted_transfer_ns"]
    assert all(time > 0 for time in layers["one"]["transfer_ns"])
    assert all(time > 0 for time in layers["stem"]["sums_ns"])


def test_a_rank_that_fails_ends_all_and_says_which() -> None:
    begin = time.monotonic()
    with pytest.raises(GpuError, match=r"rank 1 of 2 failed with exit status 3: it was me"):
        start(2, "fail")
    assert time.monotonic() - begin < 100
    assert ranks_left() == []


def test_a_rank_that_is_killed_ends_all() -> None:
    with pytest.raises(GpuError, match=r"rank 1 of 2 was ended by signal 9 \(SIGKILL\)"):
        start(2, "die", program="lost_rank")
    assert ranks_left() == []


def test_ranks_that_never_end_are_ended() -> None:
    with pytest.raises(GpuError, match=r"ranks 0, 1 of 2 did not end within 2 s"):
        start(2, "wait", program="lost_rank", timeout_s=2)
    assert ranks_left() == []


def test_a_rank_ends_with_the_process_that_started_it() -> None:
    """Its end of the pipe closes, also where that process is killed."""
    program = "import time; from gpusim.gpu.layerwise.launch import end_with_starter as e; e(); time.sleep(600)"
    rank = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, cwd=ROOT)
    assert rank.stdin is not None
    assert rank.poll() is None
    rank.stdin.close()
    assert rank.wait(timeout=100) == 1


def ranks_left() -> list[str]:
    """Return processes that this process started and that are ranks of these tests."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                words = {*(folder / "cmdline").read_bytes().split(b"\0")}
                parent = (folder / "stat").read_text().rpartition(")")[2].split()[1]
            except OSError:
                continue
            if words & {b"tests.support.rank", b"tests.support.lost_rank"} and int(parent) == os.getpid():
                found.append(folder.name)
    return found


@pytest.mark.parametrize(
    ("more", "line"),
    [({}, "RANK is not set"), ({"RANK": "0", "WORLD_SIZE": "two"}, "WORLD_SIZE='two' is no number")],
)
def test_a_rank_without_torchruns_environment_ends_with_one_line(
    more: dict[str, str], line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in more.items():
        monkeypatch.setenv(name, value)
    assert layerwise.main(["vgg16-infer-b1", "--plan", "data"]) == 2
    assert capsys.readouterr().err.strip() == f"gpusim: {line}: start the ranks with torchrun"


def test_a_rank_of_its_own_ends_with_that_line() -> None:
    words = [sys.executable, "-m", "gpusim.gpu.layerwise", "vgg16-infer-b1", "--plan", "data"]
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run(words, capture_output=True, text=True, env=environment, cwd=ROOT, check=False)
    assert (done.returncode, done.stderr.strip()) == (2, "gpusim: RANK is not set: start the ranks with torchrun")


def test_the_command_starts_ranks_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A captured network that no test of single layers has: squeeze-and-excitation in a file of its own."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)
    (tmp_path / "model.py").write_text(GATED, encoding="utf-8")
    options = CaptureOptions(spec=f"{tmp_path / 'model.py'}:gated", mode="train", batch=2)
    file = tmp_path / "gated.json.gz"
    write_trace(capture_estimated(options, load_hardware("h200"), lambda _: None), file)
    assert layerwise.main([str(file), "--plan", "model", "--dtype", "float64", "--ranks", "2", "--steps", "3"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["gpus"], document["plan"], document["outputs_equal"]) == (2, "model", True)
    assert len(document["steps_ns"]) == 3
    assert all(time_ns > 0 for time_ns in document["steps_ns"])
    assert document["graph_steps_ns"] == []


def test_what_differs_in_single_precision_is_compared_in_double(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One rank, told that no single-precision gradient is near enough."""
    (tmp_path / "model.py").write_text(GATED, encoding="utf-8")
    options = CaptureOptions(spec=f"{tmp_path / 'model.py'}:gated", mode="train", batch=2)
    file = tmp_path / "gated.json.gz"
    write_trace(capture_estimated(options, load_hardware("h200"), lambda _: None), file)
    monkeypatch.setattr(layerwise, "join", lambda: None)
    monkeypatch.setitem(check.TOLERANCE, torch.float32, -1.0)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        assert layerwise.main([str(file), "--plan", "data"]) == 0
    finally:
        dist.destroy_process_group()
    document = json.loads(capsys.readouterr().out)
    assert (document["compared_in"], document["outputs_equal"]) == ("float64", True)
    assert "in float32 gradients differ by" in document["notes"][-1]


def test_a_negative_number_of_steps_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        layerwise.main(["googlenet-train-b8", "--plan", "data", "--steps", "-1"])
    assert "--steps -1: 0 or more" in capsys.readouterr().err


@pytest.mark.gpu
def test_a_ranks_step_replays_as_a_graph(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """With its collectives, here of one rank, the step is recorded and timed."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)
    words = ["googlenet-train-b8", "--plan", "data", "--ranks", "1", "--steps", "3"]
    assert layerwise.main(words) == 0
    document = json.loads(capsys.readouterr().out)
    assert "no_graph" not in document
    assert len(document["graph_steps_ns"]) == 3
    assert statistics.median(document["graph_steps_ns"]) < statistics.median(document["steps_ns"])


@pytest.mark.parametrize(
    ("ranks", "line"),
    [
        ("0", "gpusim: --ranks is 0: give a number from 1 to 1024"),
        ("1", "gpusim: rank 0 of 1 failed with exit status 2: gpusim: 'vgg16-infer-b1' is no training step"),
    ],
)
def test_ranks_that_cannot_run_end_with_one_line(
    ranks: str, line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)
    assert layerwise.main(["vgg16-infer-b1", "--plan", "data", "--ranks", ranks]) == 2
    [found] = capsys.readouterr().err.splitlines()
    assert found.startswith(line)


# --- Without processes ---


def test_pieces_of_all_ranks_fit_together() -> None:
    """One rank's sent pieces are another's received ones, in boxes of the same size."""
    graph = small_cnn(1).for_gpus(4)
    random = np.random.default_rng(1)
    for index, user in enumerate(graph.layers):
        for number, edge in enumerate(user.inputs):
            if edge.source == BATCH:
                continue
            source = graph.layers[edge.source]
            for _ in range(4):
                ours = random.choice(layer_configs(source, 4))  # type: ignore[arg-type]
                theirs = random.choice([*layer_configs(user, 4), REPLICATED])  # type: ignore[arg-type]
                ranks = [pieces(source, ours, user, number, theirs, 4, rank) for rank in range(4)]
                for rank, mine in enumerate(ranks):
                    for peer, box in mine.sends:
                        (back,) = [b for p, b in ranks[peer].receives if p == rank]
                        assert [s.stop - s.start for s in box] == [s.stop - s.start for s in back], (index, rank, peer)
                assert sum(len(r.sends) for r in ranks) == sum(len(r.receives) for r in ranks)


def test_a_halo_is_one_row_of_the_neighbour_and_padding_is_outside() -> None:
    graph = chain(2).for_gpus(2)
    found = pieces(graph.layers[0], Config(h=2), graph.layers[1], 0, Config(h=2), 2, 0)
    assert found.shape == (4, 16, 10, 16), "8 rows, one of the neighbour, one of padding; columns are not split"
    assert found.padded == (True, False)
    assert found.receives == ((1, (slice(0, 4), slice(0, 16), slice(9, 10), slice(0, 16))),)
    assert found.sends == ((1, (slice(0, 4), slice(0, 16), slice(7, 8), slice(0, 16))),)
    assert found.interior == (slice(0, 4), slice(0, 16), slice(1, 10), slice(0, 16))


def test_one_rank_by_itself_computes_its_shares_without_the_others() -> None:
    """Shapes are those of the plan, and every parameter has a gradient; values differ."""
    graph = small_cnn(1).for_gpus(4)
    choice = tuple(max(layer_configs(layer, 4), key=lambda c: (c.parts, c.h)) for layer in graph.layers)
    for number in range(4):
        rank = Rank(graph, choice, 4, Alone(number), device=CPU)
        data = make_data(graph, 0, torch.float32, CPU)
        for index, state in enumerate(rank.states):
            rank.forward_layer(index, data)
            assert state.active == (state.output is not None)
            if state.output is not None and state.layer.kind != "loss":
                assert tuple(state.output.shape) == tuple(h - low for low, h in zip(state.low, state.high, strict=True))
        rank.step(data)
        assert all(state.output is None and not state.buffers for state in rank.states), "a step keeps no activations"
        assert len(rank.gradients()) == len(rank.parameters)


class Recorder(Alone):
    """Notes what a rank sums, and when."""

    def __init__(self, rank: int) -> None:
        super().__init__(rank)
        self.log: list[tuple[str, int]] = []

    def begin_sum(self, tensor: torch.Tensor, ranks: tuple[int, ...]) -> None:
        self.log.append((f"sum {ranks}", tensor.numel() * tensor.element_size()))


def logged(choice: Choice, graph: LayerGraph, number: int) -> list[tuple[str, int]]:
    """Return sums and layers of the backward pass of one rank of 4, in order."""
    transport = Recorder(number)
    rank = Rank(graph, choice, 4, transport, device=CPU, bucket_bytes=2048)
    backward = rank.backward_layer

    def noted(index: int) -> None:
        backward(index)
        transport.log.append(("backward", index))

    rank.backward_layer = noted  # type: ignore[method-assign]
    rank.step(make_data(graph, 0, torch.float32, CPU))
    return transport.log


def test_gradients_are_summed_during_the_backward_pass_in_the_simulations_buckets() -> None:
    """Buckets of 2 KiB. Each sum follows its last layer; ranks with other layers have the same order."""
    graph = small_cnn(1).for_gpus(4)
    choice = tuple(Config(n=2 if layer.name in ("one", "two") else 4) for layer in graph.layers)
    buckets = gradient_buckets(graph, choice, 2048)
    assert sum(bucket.full for bucket in buckets) > 2
    assert {bucket.config for bucket in buckets} == {Config(n=2), Config(n=4)}
    for number in range(4):
        mine = [bucket for bucket in buckets if number < bucket.config.parts]
        expected: list[tuple[str, int]] = []
        for index in reversed(range(len(graph))):
            expected.append(("backward", index))
            expected += [summed(bucket) for bucket in mine if bucket.full and bucket.layers[-1] == index]
        expected += [summed(bucket) for bucket in mine if not bucket.full]
        assert together(logged(choice, graph, number)) == together(expected)


def together(log: list[tuple[str, int]]) -> list[tuple[str, int]]:
    """Join sums in a row: a large gradient is summed in place, the rest of its bucket in one tensor."""
    groups = itertools.groupby(log, key=lambda entry: entry if entry[0] == "backward" else entry[0])
    return [
        entry
        for key, entries in groups
        for entry in (entries if isinstance(key, tuple) else [(key, sum(size for _, size in entries))])
    ]


def summed(bucket: Bucket) -> tuple[str, int]:
    return f"sum {tuple(range(bucket.config.parts))}", bucket.bytes


def test_the_simulation_sums_the_same_buckets() -> None:
    graph = small_cnn(1).for_gpus(4)
    hardware = load_hardware("h200")
    problem = Problem(graph, 4, load_topology("h200"), Roofline(hardware), hardware, bucket_bytes=2048)
    choice = data_parallel(graph, 4)
    lowered = lower_plan(problem, choice)
    last = [layer for layer, purpose in zip(lowered.layers, lowered.purposes, strict=True) if purpose == "sync"]
    assert list(dict.fromkeys(last)) == [each.layers[-1] for each in gradient_buckets(graph, choice, 2048)]


def test_gradients_that_fill_a_bucket_are_summed_in_place_and_others_copied() -> None:
    """With buckets of 2 KiB, small_cnn's gradients of more bytes are sums of their own, and nothing copies them."""
    graph = small_cnn(1).for_gpus(2)
    rank = Rank(graph, data_parallel(graph, 2), 2, Recorder(0), device=CPU, bucket_bytes=2048)
    summed_tensors: list[torch.Tensor] = []
    rank.transport.begin_sum = lambda tensor, ranks: summed_tensors.append(tensor)  # type: ignore[method-assign]
    rank.step(make_data(graph, 0, torch.float32, CPU))
    places = {tensor.data_ptr() for tensor in summed_tensors}
    large = [each for each in rank.gradients().values() if each.nbytes >= 2048]
    small = [each for each in rank.gradients().values() if each.nbytes < 2048]
    assert large
    assert small
    assert all(gradient.data_ptr() in places for gradient in large)
    assert all(gradient.data_ptr() not in places for gradient in small)
    copied = sum(tensor.nbytes for tensor in summed_tensors) - sum(gradient.nbytes for gradient in large)
    assert copied == sum(gradient.nbytes for gradient in small)


def test_copies_of_gradients_take_time_in_the_simulation() -> None:
    """A data-parallel step reads and writes each small gradient twice; a gradient that fills a bucket is not copied."""
    graph = small_cnn(1).for_gpus(2)
    hardware = load_hardware("h200")
    for bucket_bytes in (1, 2048, 1 << 30):
        problem = Problem(graph, 2, load_topology("h200"), Roofline(hardware), hardware, bucket_bytes=bucket_bytes)
        lowered = lower_plan(problem, data_parallel(graph, 2))
        copied = sum(
            task.dram_bytes
            for task, purpose in zip(lowered.plan.tasks, lowered.purposes, strict=True)
            if purpose == "copy"
        )
        small = [layer.weight_bytes for layer in graph.layers if 0 < layer.weight_bytes < bucket_bytes]
        assert copied == pytest.approx(2 * 2 * sum(small))


class Written(TorchDispatchMode):
    """Counts operators, and the elements that they write."""

    def __init__(self) -> None:
        super().__init__()
        self.elements: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and func.namespace == "aten":
            self.elements[str(func.overloadpacket)] += result.numel()
        return result


def test_a_data_parallel_rank_copies_no_activation_and_no_gradient_of_one() -> None:
    """A residual block with a shortcut of stride 2. Only the batch and the gradients of weights are copied."""
    net = NetworkBuilder("residual", 1)
    before = net.convolution((3, 16, 16), 8, 3, padding=1)
    inner = net.convolution(before, 8, 3, stride=2, padding=1)
    net.loss(net.linear(net.flatten(net.add([inner, net.convolution(before, 8, 1, stride=2)], relu=True)), 10))
    graph = net.graph().for_gpus(2)
    rank = Rank(graph, data_parallel(graph, 2), 2, Alone(0), device=CPU)
    with Written() as written:
        rank.step(make_data(graph, 0, torch.float32, CPU))
    assert written.elements["aten.copy_"] == 3 * 16 * 16
    assert written.elements["aten.clone"] == 0
    assert written.elements["aten.cat"] == sum(parameter.numel() for parameter in rank.parameters)


def test_one_device_is_torchs_own_network() -> None:
    """Compares the reference with torch's modules, built from the same weights."""
    graph = chain(4)
    data = make_data(graph, 3, torch.float64, CPU)
    loss, gradients = run_on_one_device(graph, data, dtype=torch.float64, seed=5, device=CPU)
    modules: list[torch.nn.Module] = []
    for index, layer in enumerate(graph.layers):
        named = parameters_of(layer, torch.Generator().manual_seed(5 * 100_003 + index), torch.float64)
        for op, weights in zip(layer.ops, named, strict=True):
            module: torch.nn.Module | None = None
            if op.kind == "convolution":
                module = torch.nn.Conv2d(*op.options["channels"], op.options["kernel"], padding=op.options["padding"])
            elif op.kind == "linear":
                module = torch.nn.Linear(*op.options["channels"])
            elif op.kind in ("relu", "pool", "flatten"):
                module = {"relu": torch.nn.ReLU(), "pool": torch.nn.MaxPool2d(2), "flatten": torch.nn.Flatten()}[
                    op.kind
                ]
            if module is not None:
                module = module.double()
                module.load_state_dict(weights)
                modules.append(module)
    network = torch.nn.Sequential(*modules)
    expected = torch.nn.functional.cross_entropy(network(data.inputs), data.targets)
    expected.backward()
    assert float(loss) == pytest.approx(float(expected.detach()), rel=1e-12)
    for ours, theirs in zip(gradients.values(), network.parameters(), strict=True):
        assert theirs.grad is not None
        assert torch.allclose(ours, theirs.grad, rtol=1e-10, atol=1e-14)


def test_statistics_of_a_run_are_by_default_those_of_a_prediction() -> None:
    """One definition: the command, the library, the simulation and a rank."""
    option = next(each for each in parallel.params if each.name == "batch_norm")
    signatures = [inspect.signature(each).parameters["batch_norm"].default for each in (gpusim.parallel, Rank)]
    assert {option.default, Problem.batch_norm, *signatures} == {DEFAULT_BATCH_NORM}


def test_groups_are_those_that_share_weights_or_statistics() -> None:
    graph = small_cnn(2).for_gpus(4)
    layer = graph.layers[0]
    assert sharing(layer, Config(n=2, c=2), 4, "local", 1) == ((1,), (1, 3))
    assert sharing(layer, Config(n=2, h=2), 4, "local", 2) == ((2, 3), (0, 1, 2, 3))
    assert sharing(layer, Config(n=2), 4, "local", 3) == ((), ())
    everyone = frozenset({(0, 1, 2, 3)})
    assert groups_of(graph, data_parallel(graph, 4), 4, "local") == Groups(everyone, everyone)


def test_a_layer_that_nothing_runs_is_named() -> None:
    graph = chain(1)
    layer = graph.layers[0]
    with pytest.raises(OptionError, match="has no operations to run"):
        run_layer(
            type(layer)(name="odd", kind="other", output=(1, 1, 1, 1), inputs=()),
            [],
            [],
            Surroundings((0, 1), (0, 1), 1),
        )


def test_collectives_of_this_machine_become_curves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two CPUs with gloo: every collective at two sizes, in a topology that can be read again."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)
    base = default_topology(load_hardware("v100"))
    found = measure_collectives(2, base, "a test")
    assert [(curve.collective, curve.gpus, len(curve.points)) for curve in found.curves] == [
        (name, 2, 2) for name in COLLECTIVES
    ]
    assert all(time_ns > 0 for curve in found.curves for _, time_ns in curve.points)
    assert found.links == base.links
    with pytest.raises(GpuError, match="has 8 GPUs per node, fewer than the 16 to measure"):
        measure_collectives(16, base, "a test")


def test_steps_are_predicted_without_the_optimizer_that_no_rank_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(ROOT / "validate" / "layerwise")
    shares = importlib.import_module("measured_shares")
    planner = shares.Planner(chain(1).for_gpus(2), 2, shares.Shares(tmp_path / "shares.json"), CPU)
    assert planner.problem().times.optimizer_ns(1e6) == 0


def test_the_script_for_one_gpu_predicts_measures_and_goes_on_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`--quick` on a CPU: three plans of a small network, each rank's shares alone, then as a whole."""
    words = [sys.executable, str(ROOT / "validate" / "layerwise" / "ranks.py"), "--quick", "-o", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, capture_output=True, text=True, env=environment, check=True)
    assert done.stdout.splitlines()[-1] == "done"
    (file,) = tmp_path.glob("parallel_*.json")
    rows = json.loads(file.read_text())["cases"]
    assert [(row["plan"], row["gpus"], row["communication"]) for row in rows] == [
        (plan, 2, "predicted") for plan in ("data", "layer", "owt")
    ]
    assert all(row["predicted_ns"] > 0 and row["measured_ns"] > 0 for row in rows)
    before = sorted((path, path.stat().st_mtime_ns) for path in (tmp_path / "parallel_work").glob("*gpus-*.json"))
    monkeypatch.syspath_prepend(ROOT / "validate" / "layerwise")
    assert importlib.import_module("ranks").main(words[2:]) == 0
    after = sorted((path, path.stat().st_mtime_ns) for path in (tmp_path / "parallel_work").glob("*gpus-*.json"))
    assert before == after
