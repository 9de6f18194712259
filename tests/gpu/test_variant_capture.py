"""Variants that capture measures and keeps, with a stand-in for the profiler."""

from __future__ import annotations

import itertools
import weakref
from typing import Any

import msgspec
import pytest
import torch

from gpusim.formats.hardware import load_hardware
from gpusim.formats.trace import Kernel, Op, Storage, Tensor, TensorInit, Variant, VariantSettings
from gpusim.gpu.capture import variants as variant_capture
from gpusim.gpu.capture.variants import MAX_VARIANTS, choose_variants, equal_calls, in_turns, launches, longest_first
from gpusim.gpu.capture.workspaces import workspace_of
from gpusim.gpu.replay.decompositions import MIN_OP_NS
from gpusim.gpu.replay.execute import Runner
from gpusim.gpu.replay.fusion import chains_of
from gpusim.gpu.replay.variants import settings_for
from gpusim.trace.check import check_trace
from gpusim.trace.store import load_trace
from tests.gpu.test_variants import conv_trace, variant, with_variants
from tests.support.helpers import (
    HALF,
    WHOLE,
    chain_trace,
    kernel,
)


def test_equal_calls_are_measured_once() -> None:
    step = load_trace("googlenet-train-b8")
    groups = equal_calls(step)
    members = [index for group in groups.values() for index in group]
    chains = chains_of(step)
    assert chains

    def total_ns(*indices: int) -> int:
        return sum(kernel.dur_ns for index in indices for kernel in step.ops[index].kernels)

    assert sorted(members) == [
        index
        for index, each in enumerate(step.ops)
        if (each.kernels and "conv" in each.target)
        or "mm." in each.target
        or (
            ("batch_norm" in each.target or "max_pool2d_with_indices_backward" in each.target)
            and total_ns(index) >= MIN_OP_NS
        )
        or index in chains
    ]
    assert len(groups) < len(members)
    for first, group in groups.items():
        assert all(launches(step.ops[index].kernels) == launches(step.ops[first].kernels) for index in group)
    assert equal_calls(chain_trace(3)) == {}


def test_settings_that_ask_for_what_already_is_are_not_tried() -> None:
    step = load_trace("googlenet-train-b32-bf16")
    convolution = next(each for each in step.ops if each.target == "aten.convolution.default")
    names = set(settings_for(convolution, step))
    assert "no_tf32" not in names
    assert ("channels_last" in names) == (step.model.memory_format == "contiguous")


def test_kept_are_faster_or_smaller_kernels_that_are_not_there_yet() -> None:
    control = [kernel(10_000, WHOLE)]
    found = [
        variant("the same", kernel(9000, WHOLE, regs=0)),
        variant("faster", msgspec.structs.replace(kernel(8000, WHOLE), name="fast")),
        variant("the same as faster", msgspec.structs.replace(kernel(8100, WHOLE), name="fast")),
        variant("smaller", kernel(15_000, HALF)),
        variant("slower", msgspec.structs.replace(kernel(11_000, WHOLE), name="slow")),
        variant("nothing"),
    ]
    found[0] = variant("the same", msgspec.structs.replace(control[0], dur_ns=9000))
    kept = choose_variants(control, found, load_hardware("h200"))
    assert [each.name for each in kept] == ["faster", "smaller"]
    assert [each.name for each in choose_variants(control, found, None)] == ["faster"]


def test_the_variant_of_least_workspace_is_kept_however_slow() -> None:
    """Captured: 100 bytes. Of two variants with 20 bytes the faster one stays, beyond the usual limit, too."""

    def takes(name: str, ns: int, workspace_bytes: int | None) -> Variant:
        kernels = (msgspec.structs.replace(kernel(ns, WHOLE), name=name),)
        return msgspec.structs.replace(variant(name, *kernels), workspace_bytes=workspace_bytes)

    control = [kernel(10_000, WHOLE)]
    slow = [takes("unknown", 19_000, None), takes("slowest", 90_000, 20), takes("slow", 70_000, 20)]

    def names(found: list[Variant], workspace_bytes: int) -> list[str]:
        return [each.name for each in choose_variants(control, found, None, (), workspace_bytes)]

    assert names(slow, 100) == ["slow"]
    assert names(slow, 20) == [], "the captured call takes no more"
    faster = [takes(f"faster {number}", 9000 - number, 300) for number in range(MAX_VARIANTS + 1)]
    assert names([*faster, *slow], 100) == [*(f"faster {number}" for number in range(MAX_VARIANTS, 0, -1)), "slow"]
    assert names([takes("fast", 5000, 10), *slow], 100) == ["fast"], "it is the one of least workspace"


def test_variants_are_measured_once_for_equal_calls_and_scaled_to_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two equal convolutions, of which the second took twice as long in the step: its variant does, too."""
    one = conv_trace()
    first = one.ops[0]
    slower = (msgspec.structs.replace(first.kernels[0], dur_ns=10_000, name=first.kernels[0].name),)
    second = msgspec.structs.replace(first, name="again", kernels=slower)
    made = msgspec.structs.replace(one, ops=(first, second))
    profiled: list[str] = []

    def profile(runner: Runner, calls: Any) -> list[tuple[Kernel, ...]]:
        profiled.extend(call.name for call in calls)
        durations = {"": 4000, "deterministic": 3000, "native": 2000}
        return [
            (msgspec.structs.replace(kernel(durations.get(call.name, 4000)), name=call.name or "captured"),)
            for call in calls
        ]

    def refuse_native(runner: Runner, call: Any) -> bool:
        return call.name != "native"

    monkeypatch.setattr(variant_capture, "require_gpu", lambda: torch.device("cpu"))
    monkeypatch.setattr(variant_capture, "_profile", profile)
    monkeypatch.setattr(variant_capture, "_works", refuse_native)
    monkeypatch.setattr(variant_capture, "workspace_of", lambda call: 4096)
    monkeypatch.setattr(variant_capture, "alone", lambda work, *arguments: work(*arguments))
    monkeypatch.setattr(variant_capture, "anchored_variants", lambda trace, *_: trace)
    found = [each.variants for each in variant_capture.with_variants(made, seed=0).ops]
    assert profiled.count("") == 1
    assert "native" not in profiled
    autotuned = [name for name in profiled if "benchmark" in name]
    assert profiled[-len(autotuned) :] == autotuned, "in a process of their own"
    assert [[(each.name, each.kernels[0].dur_ns, each.workspace_bytes) for each in mine] for mine in found] == [
        [("deterministic", 3750, 4096)],
        [("deterministic", 7500, 4096)],
    ]


def test_workspace_is_the_peak_of_a_call_without_what_it_leaves_and_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    """There are 100 bytes. A call takes 700 more at its peak; 200 of them it leaves, and 50 are its result."""
    counted = {"requested_bytes.all.peak": 0, "requested_bytes.all.current": 100}
    returned: list[weakref.ref[torch.Tensor]] = []

    def reset() -> None:
        counted["requested_bytes.all.peak"] = counted["requested_bytes.all.current"]

    def call() -> torch.Tensor:
        result = torch.zeros(1)
        returned.append(weakref.ref(result))
        counted.update({"requested_bytes.all.peak": 800, "requested_bytes.all.current": 350})
        return result

    def stats() -> dict[str, int]:
        assert returned[0]() is not None, "the result is still there"
        return counted

    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", reset)
    monkeypatch.setattr(torch.cuda, "memory_stats", stats)
    assert workspace_of(call) == 450


def test_only_operators_without_variants_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """A convolution with variants stays unchanged, and so do its equals; without work no GPU is needed."""
    one = conv_trace()
    known = with_variants(one, {0: (variant("slow", kernel(9000), cudnn=False),)})
    monkeypatch.setattr(variant_capture, "require_gpu", lambda: pytest.fail("asked for a GPU"))
    assert variant_capture.with_variants(known) == known
    again = msgspec.structs.replace(one.ops[0], name="again")
    assert equal_calls(msgspec.structs.replace(known, ops=(*known.ops, again))) == {}
    assert equal_calls(msgspec.structs.replace(one, ops=(*one.ops, again))) == {0: [0, 1]}


def test_calls_that_take_longest_in_the_step_are_tuned_first() -> None:
    """Two equal calls of 6 us together come before one of 10 us only where they take longer: 2 x 6 > 10."""
    one = conv_trace().ops[0]

    def taking(ns: int, name: str) -> Op:
        return msgspec.structs.replace(one, name=name, kernels=(kernel(ns),))

    alone = msgspec.structs.replace(taking(10_000, "alone"), kernels=(kernel(10_000, HALF),))
    made = msgspec.structs.replace(conv_trace(), ops=(alone, taking(6_000, "a"), taking(6_000, "b")))
    assert equal_calls(made) == {0: [0], 1: [1, 2]}
    assert [each.op for each in longest_first(made, [call(0, "benchmark"), call(1, "benchmark")])] == [1, 0]


def call(op: int, name: str) -> Any:
    return variant_capture._Call(op, name, None if not name else VariantSettings())


def test_neighbours_are_of_other_ops_under_other_settings() -> None:
    """In a step a kernel finds neither its arguments in the cache nor, mostly, its instructions."""
    calls = [call(op, name) for op in (3, 5, 8) for name in ("", "native", "benchmark")] + [call(9, "")]
    found = [(each.op, each.name) for each in in_turns(calls)]
    assert sorted(found) == sorted((each.op, each.name) for each in calls)
    assert found[:4] == [(3, ""), (5, "native"), (8, "benchmark"), (9, "")]
    for (op, name), (other, other_name) in itertools.pairwise(found[:4]):
        assert op != other
        assert name != other_name
    assert in_turns([]) == []


def test_ops_run_as_one_are_held_against_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two equal convolutions with a ReLU: 5 us beat 4 and 2 us, and each variant covers the ReLU behind it."""
    tensor = {"shape": (1, 1, 4, 4), "stride": (16, 16, 4, 1), "dtype": "float32"}
    init = TensorInit(kind="normal", b=1.0)
    tensors = [
        Tensor(**tensor, storage=0, role="input", init=init),
        Tensor(shape=(1, 1, 1, 1), stride=(1, 1, 1, 1), dtype="float32", storage=1, role="parameter", init=init),
        *(Tensor(**tensor, storage=2 + number, role="activation") for number in range(4)),
    ]
    ops = []
    for number, (read, made, out) in enumerate(((0, 2, 3), (3, 4, 5))):
        rest = ([1, 1], [0, 0], [1, 1], False, [0, 0], 1)
        convolution = ({"tensor": read}, {"tensor": 1}, None, *rest)
        ops.append(
            Op(
                name=f"convolution_{number}",
                target="aten.convolution.default",
                args=convolution,
                outputs=(made,),
                reads=(read, 1),
                writes=(made,),
                kernels=(kernel(4000),),
            )
        )
        ops.append(
            Op(
                name=f"relu_{number}",
                target="aten.relu.default",
                args=({"tensor": made},),
                outputs=(out,),
                reads=(made,),
                writes=(out,),
                kernels=(kernel(2000),),
            )
        )
    storages = tuple(Storage(bytes=64) for _ in range(6))
    made_trace = msgspec.structs.replace(conv_trace(), tensors=tuple(tensors), storages=storages, ops=tuple(ops))
    check_trace(made_trace, "t")
    assert equal_calls(made_trace) == {0: [0, 2]}

    def profile(runner: Runner, calls: Any) -> list[tuple[Kernel, ...]]:
        durations = {"": 4000, "fused": 5000, "fused_channels_last": 7000}
        return [(msgspec.structs.replace(kernel(durations.get(c.name, 9000)), name=c.name or "kernel"),) for c in calls]

    monkeypatch.setattr(variant_capture, "require_gpu", lambda: torch.device("cpu"))
    monkeypatch.setattr(variant_capture, "_profile", profile)
    monkeypatch.setattr(variant_capture, "_works", lambda runner, call: variant_capture._run(runner, call) is not None)
    monkeypatch.setattr(variant_capture, "workspace_of", lambda call: 0)
    monkeypatch.setattr(variant_capture, "alone", lambda work, *arguments: work(*arguments))
    monkeypatch.setattr(variant_capture, "anchored_variants", lambda trace, *_: trace)
    found = variant_capture.with_variants(made_trace, seed=0)
    check_trace(found, "t")
    covering = [[(v.name, v.covers) for v in op.variants if v.covers] for op in found.ops]
    assert covering == [[("fused", (1,))], [], [("fused", (3,))], []]
    assert chains_of(made_trace)[0].keys() == {"fused", "fused_channels_last"}
    again = variant_capture.ways_to_try(found)
    assert not any("fused" in ways for ways in again.values()), "measured once"
