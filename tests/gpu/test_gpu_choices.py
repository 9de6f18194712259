"""On a CUDA GPU: variants and partitions give the sequential run's results, and partitions keep kernels apart."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import torch

from gpusim.formats.hardware import load_hardware
from gpusim.formats.schedule import Partition
from gpusim.formats.trace import Composition, Trace
from gpusim.gpu.capture.capture import capture
from gpusim.gpu.capture.options import CaptureOptions
from gpusim.gpu.isolate import alone
from gpusim.gpu.replay.decompositions import composed
from gpusim.gpu.replay.green_contexts import Partitions, sm_groups
from gpusim.gpu.replay.operators import resolve
from gpusim.gpu.replay.replay import replay
from gpusim.trace.check import check_trace
from gpusim.trace.store import load_trace
from tests.support.chains import chosen_by_name, with_chains
from tests.support.helpers import build_graph, schedule_of
from tests.support.networks import spec

# Libraries warn about themselves on a GPU, which these tests ignore.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

SMID_SOURCE = """
extern "C" __global__ void smid(int* out, int base) {
    unsigned int id;
    asm volatile("mov.u32 %0, %smid;" : "=r"(id));
    long long begin = clock64();
    while (clock64() - begin < 20000) {}
    if (threadIdx.x == 0) out[base + blockIdx.x] = (int)id;
}
"""
BLOCKS = 1024


@pytest.fixture(scope="module")
def trace() -> Trace:
    """A training step with variants, captured in a process of its own."""
    options = CaptureOptions(spec=spec("branches"), mode="train", batch=2, variants=True, command="test")
    found: Trace = alone(capture, options).trace
    return found


@pytest.fixture(autouse=True)
def _memory() -> Iterator[None]:
    """Free the GPU memory of a test."""
    yield
    gc.collect()
    torch.cuda.empty_cache()


def test_captured_variants_have_kernels_of_their_own_and_give_the_same_results(trace: Trace) -> None:
    """Every op with variants runs its last one, and results agree within the tolerance of variants."""
    check_trace(trace, "captured")
    having = [op for op in trace.ops if op.variants]
    assert having, "no convolution or product has another algorithm"
    for op in having:
        own = [kernel.name for kernel in op.kernels]
        assert all(variant.kernels and variant.kernels != op.kernels for variant in op.variants), own
    n = len(trace.ops)
    streams = [index % 2 for index in range(n)]
    chosen = [len(op.variants) for op in trace.ops]
    schedule = schedule_of(range(n), streams, policy="test", variants=chosen)
    (measured,) = replay(build_graph(trace, load_hardware("h200")), [schedule], recordings=1)
    assert measured.outputs.equal, measured.outputs


@pytest.mark.parametrize(
    ("bundled", "name"),
    [
        ("squeezenet1_1-infer-b1", "fused"),
        ("squeezenet1_1-infer-b1", "fused_channels_last"),
        ("squeezenet1_1-infer-b1", "joined"),
        ("googlenet-infer-b1", "fused"),
        ("resnet50-train-b8", "joined"),
        ("googlenet-train-b8", "joined_sums"),
        ("googlenet-train-b8", "fused_sgd"),
    ],
)
def test_ops_run_as_one_give_the_same_results(bundled: str, name: str) -> None:
    """Every possible fusion, on two streams, with covered ops on another one than the op that does their work."""
    step = with_chains(load_trace(bundled))
    chosen = chosen_by_name(step, name)
    n = len(step.ops)
    streams = [index % 2 for index in range(n)]
    schedule = schedule_of(range(n), streams, policy="test", variants=chosen)
    (measured,) = replay(build_graph(step, load_hardware("h200")), [schedule], recordings=1)
    assert measured.outputs.equal, measured.outputs
    assert measured.outputs.sensitive


@pytest.mark.parametrize(
    ("name", "dtype"), [("native", torch.float32), ("by_sample", torch.float32), ("by_sample", torch.bfloat16)]
)
def test_batch_norm_by_other_operators_gives_the_same_results(name: Composition, dtype: torch.dtype) -> None:
    """Forward with running statistics, and backward, in a CUDA graph; cuDNN's operators, and torch's own in bf16."""
    torch.manual_seed(0)
    image = (torch.randn(8, 32, 57, 57, device="cuda") + 1).to(dtype)
    grad = torch.randn_like(image)
    weight, bias = torch.rand(32, device="cuda").to(dtype), torch.rand(32, device="cuda").to(dtype)
    library = "cudnn" if dtype == torch.float32 else "native"
    targets = [f"aten.{library}_batch_norm.default", f"aten.{library}_batch_norm_backward.default"]
    results = []
    for forward, backward in (
        [resolve(target) for target in targets],
        [composed(target, name) for target in targets],
    ):
        running = [torch.zeros(32, device="cuda", dtype=dtype), torch.ones(32, device="cuda", dtype=dtype)]

        def run(forward: Any = forward, backward: Any = backward, running: Any = running) -> list[torch.Tensor]:
            out, mean, invstd, *reserve = forward(image, weight, bias, *running, True, 0.1, 1e-3)
            saved = (weight, *running, mean, invstd)
            if library == "cudnn":
                back = backward(image, grad, *saved, 1e-3, *reserve)
            else:
                back = backward(grad, image, *saved, True, 1e-3, [True, True, True])
            return [out, mean, invstd, *back]

        with torch.no_grad():
            run()
            for part, value in zip(running, (0, 1), strict=True):
                part.fill_(value)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                recorded = run()
            graph.replay()
        results.append([*recorded, *running])
    tolerance = 1e-4 if dtype == torch.float32 else 2e-2
    for found, expected in zip(results[1], results[0], strict=True):
        assert found.dtype == expected.dtype
        error = (found.double() - expected.double()).norm() / expected.double().norm()
        assert error <= tolerance


def test_partitioned_schedule_gives_the_same_results(trace: Trace) -> None:
    n = len(trace.ops)
    groups = sm_groups()
    half = groups.count // 2 * groups.group_sms
    partitions = (Partition(sms=half, streams=(0,)),)  # stream 1 gets the left-over SMs
    model = load_hardware("h200")
    model = msgspec.structs.replace(model, limits=msgspec.structs.replace(model.limits, sms=groups.sms))
    streams = [index % 2 for index in range(n)]
    schedule = schedule_of(range(n), streams, policy="test", partitions=partitions)
    (measured,) = replay(build_graph(trace, model), [schedule], recordings=1)
    assert measured.outputs.equal, measured.outputs


def test_kernels_of_two_partitions_share_no_sm_in_a_replayed_graph() -> None:
    groups = sm_groups()
    half = groups.count // 2 * groups.group_sms
    parted = Partitions([half, groups.sms - half])
    streams = [parted.stream(0), parted.stream(1)]
    kernel = torch.cuda._compile_kernel(SMID_SOURCE, "smid")
    seen = torch.full((2, BLOCKS), -1, dtype=torch.int32, device="cuda")

    def launch() -> None:
        streams[1].wait_stream(streams[0])
        for number, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                kernel(grid=(BLOCKS, 1, 1), block=(256, 1, 1), args=[seen, number * BLOCKS])
        streams[0].wait_stream(streams[1])

    torch.cuda.synchronize()
    launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=streams[0], capture_error_mode="thread_local"):
        launch()
    seen.fill_(-1)
    torch.cuda.synchronize()
    graph.replay()
    torch.cuda.synchronize()
    one, other = (set(row) for row in seen.tolist())
    assert not one & other
    assert (len(one), len(other)) == (half, groups.sms - half)
