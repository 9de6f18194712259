"""Styles of Inductor and alternative kernels of its calls: the choice among them, and results equal to eager's."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import msgspec
import pytest
import torch

from gpusim.errors import CaptureError
from gpusim.formats.trace import KERNEL, Kernel, Trace, Variant, VariantSettings
from gpusim.gpu.capture import variants
from gpusim.gpu.inductor import functional, step, versions
from gpusim.gpu.inductor.combos import promises_combos, saved_launches
from gpusim.gpu.inductor.styles import CHANNELS_LAST, DEFAULT_STYLE, GEMV, STYLES, Noted, first_style, settings_of
from gpusim.gpu.optimize import choose, dynamo, fronts, kept_step, make
from gpusim.gpu.optimize.captured import Captured
from gpusim.gpu.optimize.executors import CpuExecutor, UserRunner
from gpusim.gpu.replay.variants import CONVOLUTIONS
from tests.support.helpers import chain_trace, make_trace, op, wide_trace
from tests.support.networks import Branches, Residual, image
from tests.support.optimizing import eager_step, fast


@pytest.fixture(autouse=True)
def _short_searches(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A budget that allows other kernels, very short searches, and branches joined as on a GPU."""
    from torch._inductor import config

    original = choose.explore
    monkeypatch.setattr(choose, "explore", lambda graph, **given: original(graph, **{**given, "budget_s": 0.02}))
    monkeypatch.setattr(make, "LIMIT_S", {"infer": 1e4, "train": 1e4})  # however slow this machine is
    with config.patch(force_pointwise_cat=True):
        yield


def by_inductor(model: torch.nn.Module, inputs: Any = None, **options: Any) -> tuple[Any, list[str]]:
    lines: list[str] = []
    given = {"budget_s": choose.KERNELS_FROM_S, "frontends": ("inductor",), "say": lines.append, **options}
    return fast(model, image(2) if inputs is None else inputs, **given), lines


@pytest.fixture
def one_style(monkeypatch: pytest.MonkeyPatch) -> None:
    """No style beside the first, for what is the same in all."""
    monkeypatch.setattr(Noted, "other_styles", lambda *_, **__: [])


def branches() -> Branches:
    torch.manual_seed(0)
    return Branches().eval()


def same(step: Any, model: torch.nn.Module) -> None:
    x = image(2)
    with torch.no_grad():
        torch.testing.assert_close(step(x), model(x), rtol=5e-4, atol=5e-4)


@pytest.mark.parametrize(
    ("noted", "others"),
    [
        (Noted(), []),
        (Noted(joins_calls=True), ["apart_given_layout"]),
        (Noted(layout_optimized=True), ["given_layout"]),
        (Noted(joins_calls=True, layout_optimized=True), ["apart", "given_layout"]),
        (Noted("given_layout"), ["channels_last"]),
        (Noted("given_layout", joins_calls=True), ["apart_given_layout", "channels_last"]),
        (Noted("channels_last", True, True), ["apart_channels_last", "given_layout"]),
        (Noted("gemv"), ["default"]),
        (Noted("gemv_given_layout", joins_calls=True), ["given_layout", "apart_given_layout", "channels_last"]),
    ],
)
def test_styles_that_decide_otherwise_are_tried(noted: Noted, others: list[str]) -> None:
    assert noted.other_styles() == others
    assert set(others) <= set(STYLES)


def test_combo_kernels_are_a_style_in_the_layout_of_the_first() -> None:
    assert Noted().other_styles(combos=True) == ["combo"]
    for layout in ("given_layout", "channels_last"):
        assert Noted(layout, joins_calls=True).other_styles(combos=True)[-1] == f"combo_{layout}"
    settings = settings_of("combo_given_layout")
    assert settings["combo_kernels"] is True
    assert settings["layout_optimization"] is False


def as_kernels(trace: Trace) -> Trace:
    return msgspec.structs.replace(trace, ops=tuple(msgspec.structs.replace(op, target=KERNEL) for op in trace.ops))


@pytest.mark.parametrize(
    ("trace", "saved"),
    [
        (as_kernels(wide_trace(width=9, depth=2)), 14),  # at two depths, 9 launches become 2: of 8 kernels and of 1
        (wide_trace(width=9, depth=2), 0),  # calls are not joined
        (as_kernels(chain_trace(9)), 0),  # nothing is independent
        (as_kernels(wide_trace(width=9, depth=2, elements=1 << 20)), 0),  # each moves 8 MiB
    ],
)
def test_combo_kernels_are_tried_where_small_independent_kernels_are_many(trace: Trace, saved: int) -> None:
    assert saved_launches(trace) == saved
    assert promises_combos(trace, "cuda") == (saved > 0)
    assert not promises_combos(trace, "cpu")


def test_a_step_with_few_launches_to_save_promises_no_combos() -> None:
    """3 kernels at one depth of 41 ops: 2 launches, less than 5 %."""
    trace = as_kernels(make_trace([*(op(f"a{n}", f"a{n - 1}" if n else "x") for n in range(38)),
                                   *(op(f"b{n}", "a37") for n in range(3))]))  # fmt: skip
    assert saved_launches(trace) == 2
    assert not promises_combos(trace, "cuda")


def test_a_style_that_makes_the_same_kernels_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU torch joins no kernels."""
    monkeypatch.setattr(fronts, "promises_combos", lambda *_: True)
    model = branches()
    step, lines = by_inductor(model)
    assert "compiling it with Inductor (combo)" in lines
    assert "the style combo makes the same kernels" in lines
    assert not any(line.startswith("Inductor's kernels (combo)") for line in lines)
    same(step, model)


def test_training_on_images_begins_with_the_layout_in_which_convolutions_are_faster() -> None:
    assert first_style(trains_images=True, channels_last_is_faster=False) == "given_layout"
    assert first_style(trains_images=True, channels_last_is_faster=True) == CHANNELS_LAST
    assert {first_style(False, faster) for faster in (False, True)} == {DEFAULT_STYLE}
    assert first_style(True, False, mostly_gemv=True) == "given_layout"


def test_a_step_that_reads_its_matrices_for_one_row_begins_with_sums() -> None:
    assert first_style(False, False, mostly_gemv=True) == GEMV
    torch.manual_seed(0)
    nn = torch.nn
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)).requires_grad_(False)
    step, lines = by_inductor(model, torch.randn(1, 64))
    assert "compiling it with Inductor (gemv)" in lines
    x = torch.randn(1, 64)
    torch.testing.assert_close(step(x), model(x))


def test_a_step_whose_sums_cannot_be_compiled_has_the_default_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: Any) -> Any:
        raise CaptureError("no sums today")

    monkeypatch.setattr(step, "products_as_sums", refuse)
    model = torch.nn.Linear(64, 64).requires_grad_(False)
    _, lines = by_inductor(model, torch.randn(1, 64))
    assert "left out Inductor's kernels (gemv): no sums today" in lines
    assert any(line.startswith("Inductor's kernels (default)") for line in lines)


def test_other_styles_are_compiled_and_predicted_and_the_best_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """One kernel joins the block's branches, and images become channels last: both have alternatives.

    The step's calls are traced once for all of them.
    """
    trace, traced = functional._functionalized, []
    monkeypatch.setattr(functional, "_functionalized", lambda *given: traced.append(1) or trace(*given))
    model = branches()
    step, lines = by_inductor(model)
    compiled = [line.partition("(")[2][:-1] for line in lines if line.startswith("compiling it")]
    assert compiled == [DEFAULT_STYLE, "apart", "given_layout"]
    predicted = [line.partition(":")[0] for line in lines if line.endswith("before any search")]
    assert predicted == [f"Inductor's kernels ({style})" for style in compiled]
    assert lines.count("searching") <= make.SEARCHED
    assert traced == [1]
    same(step, model)


class FasterLast(CpuExecutor):
    """Executor whose convolutions are faster channels last."""

    def brief_ns(self, call: Callable[[], object]) -> float:
        assert isinstance(call, partial)
        return 1.0 if call.args[1].is_contiguous(memory_format=torch.channels_last) else 2.0


def test_training_channels_last_ends_as_eager_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Autocast stands between the weights and the convolutions: 3 forward, 5 backward, of 2 ns and of 1.

    Gradients reach the fused optimizer in the layout of the parameters.
    """
    monkeypatch.setattr(make, "LIMIT_S", {"infer": 0.0, "train": 0.0})
    torch.manual_seed(0)
    model = Residual(blocks=1)
    other = copy.deepcopy(model)
    mine, theirs = (torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9, fused=True) for each in (model, other))
    given = (image(2), torch.tensor([1, 3]))
    loss = torch.nn.functional.cross_entropy
    with torch.autocast("cpu", torch.bfloat16):
        step, lines = by_inductor(model, given, loss=loss, optimizer=mine, executor=FasterLast())
    eager = eager_step(other, theirs)
    assert "its convolutions take 0.016 us as recorded, 0.008 us channels last" in lines
    assert "compiling it with Inductor (channels_last)" in lines
    assert step.gain.frontend == "inductor"
    for _ in range(3):
        x, y = image(2), torch.randint(0, 7, (2,))
        with torch.autocast("cpu", torch.bfloat16):  # torch casts a weight once within a context
            torch.testing.assert_close(step(x, y), eager(x, y), rtol=2e-2, atol=2e-2)
    for name, weight in model.named_parameters():
        torch.testing.assert_close(weight, other.get_parameter(name), rtol=5e-3, atol=5e-3)
        assert weight.grad is not None
        assert weight.grad.stride() == weight.stride()


@pytest.mark.parametrize("cast", [False, True])
def test_a_step_that_cannot_be_channels_last_begins_with_its_own_layout(
    monkeypatch: pytest.MonkeyPatch, cast: bool
) -> None:
    """The layout is tried first, since convolutions are faster in it: 1 forward, 1 backward, of 2 ns and of 1."""
    original = fronts.fused

    def fused(step: Any, captured: Captured, style: str, *given: Any) -> Captured:
        if style == CHANNELS_LAST:
            raise CaptureError("the step addresses memory of images by strides; use another style")
        return original(step, captured, style, *given)

    monkeypatch.setattr(fronts, "fused", fused)
    monkeypatch.setattr(make, "LIMIT_S", {"infer": 0.0, "train": 0.0})
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten())
    given = (image(2), torch.tensor([1, 3]))
    loss, optimizer = torch.nn.functional.cross_entropy, torch.optim.SGD(model.parameters(), lr=0.1)
    with torch.autocast("cpu", torch.bfloat16, enabled=cast):
        step, lines = by_inductor(model, given, loss=loss, optimizer=optimizer, executor=FasterLast())
    compiled = [line.partition("(")[2][:-1] for line in lines if line.startswith("compiling it")]
    assert compiled == [CHANNELS_LAST, "given_layout"]
    assert "its convolutions take 0.004 us as recorded, 0.002 us channels last" in lines
    assert step.gain.without == ""


def test_on_another_torch_one_line_is_said_and_nothing_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "series", lambda: "2.12")
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten())
    given = (image(2), torch.tensor([1, 3]))
    loss, optimizer = torch.nn.functional.cross_entropy, torch.optim.SGD(model.parameters(), lr=0.1)
    executor, both = FasterLast(), ("aten", "inductor")
    step, lines = by_inductor(model, given, loss=loss, optimizer=optimizer, executor=executor, frontends=both)
    assert len([line for line in lines if line.startswith("left out")]) == 1
    assert not [line for line in lines if "convolutions" in line]
    assert "knows torch 2.11 and 2.13" in step.gain.without


def test_a_forward_alone_begins_with_the_layout_in_which_it_saves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its backward is another step, of torch.compile's, and takes the saved images as they were recorded."""
    styles: list[tuple[str, str]] = []

    def fused(step: Any, captured: Captured, style: str, *_: Any) -> Captured:
        styles.append((captured.options.spec, style))
        raise CaptureError("ATen's calls will do")

    monkeypatch.setattr(fronts, "fused", fused)
    wanted = choose.Wanted(3, choose.KERNELS_FROM_S, None)
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Conv2d(4, 4, 3))
    compiled = torch.compile(
        model, backend=lambda graph, inputs: dynamo.compiled(graph, inputs, wanted, FasterLast()), dynamic=False
    )
    compiled(image(2)).sum().backward()
    assert styles == [("torch.compile forward", "given_layout"), ("torch.compile backward", "default")]


def test_no_style_is_compiled_where_no_time_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(make, "LIMIT_S", {"infer": 0.0, "train": 0.0})
    _, lines = by_inductor(branches())
    assert sum(line.startswith("compiling it") for line in lines) == 1
    assert any(line.startswith("no time is left for the style apart") for line in lines)


def test_a_style_that_does_not_compile_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    original = fronts.fused

    def fused(step: Any, captured: Captured, style: str, *given: Any) -> Captured:
        if style == "apart":
            raise CaptureError("a line that matches no node")
        return original(step, captured, style, *given)

    monkeypatch.setattr(fronts, "fused", fused)
    model = branches()
    step, lines = by_inductor(model)
    assert "left out Inductor's kernels (apart): a line that matches no node" in lines
    assert step.gain.without == ""
    same(step, model)


def test_the_second_start_without_torchs_cache_compiles_the_chosen_style(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fronts, "first_style", lambda *_: "given_layout")
    monkeypatch.setattr(make, "LIMIT_S", {"infer": 0.0, "train": 0.0})
    model = branches()
    by_inductor(model)
    monkeypatch.setattr(choose, "explore", lambda *_, **__: pytest.fail("searched again"))
    monkeypatch.setattr(kept_step, "stored_text", lambda _: None)
    step, lines = by_inductor(model)
    assert step.gain.decided_by == "what was found before"
    assert [line for line in lines if line.startswith("compiling it")] == ["compiling it with Inductor (given_layout)"]
    same(step, model)


class Varied(CpuExecutor):
    """Executor whose convolutions have another algorithm that takes half as long."""

    def with_variants(self, captured: Captured, trace: Trace, left_s: float, say: Callable[[str], None]) -> Trace:
        def varied(op: Any) -> Any:
            if op.target not in CONVOLUTIONS:
                return op
            kernels = tuple(msgspec.structs.replace(each, dur_ns=each.dur_ns // 2) for each in op.kernels)
            faster = Variant(name="deterministic", settings=VariantSettings(deterministic=True), kernels=kernels)
            return msgspec.structs.replace(op, variants=(faster,))

        return msgspec.structs.replace(trace, ops=tuple(map(varied, trace.ops)))


@pytest.mark.usefixtures("one_style")
def test_calls_between_inductors_kernels_run_other_algorithms() -> None:
    model = branches()
    step, _ = by_inductor(model, executor=Varied())
    assert step.gain.frontend == "inductor"
    assert step.gain.kernels_chosen
    same(step, model)


class Lost(CpuExecutor):
    def with_variants(self, captured: Captured, trace: Trace, left_s: float, say: Callable[[str], None]) -> Trace:
        raise CaptureError("the profiler lost a kernel")


@pytest.mark.usefixtures("one_style")
def test_kernels_that_cannot_be_measured_leave_those_of_the_step() -> None:
    model = branches()
    step, lines = by_inductor(model, executor=Lost())
    assert "left out other kernels of its calls: the profiler lost a kernel" in lines
    assert not step.gain.kernels_chosen
    same(step, model)


@pytest.mark.usefixtures("one_style")
def test_other_algorithms_of_inductors_calls_are_measured_in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Autotuned calls run in their own thread; each distinct call once, on the tensors of the step."""
    seen: list[tuple[str, str]] = []

    def profile(runner: UserRunner, calls: list[Any]) -> list[tuple[Kernel, ...]]:
        import threading

        seen.extend((threading.current_thread().name.partition("_")[0], call.name) for call in calls)
        return [(Kernel(name=f"k_{call.name}", dur_ns=900 if call.name else 1000, grid=(1, 1, 1)),) for call in calls]

    monkeypatch.setattr(variants, "_profile", profile)
    monkeypatch.setattr(variants, "_works", lambda runner, call: True)
    found: list[Trace] = []

    class Measuring(CpuExecutor):
        def with_variants(self, captured: Captured, trace: Trace, left_s: float, say: Callable[[str], None]) -> Trace:
            runner = UserRunner(captured, trace, self.device)
            runner.run_in_order()
            found.append(variants.with_variants_of(runner, say))
            return trace

    by_inductor(branches(), executor=Measuring())
    assert {name for thread, name in seen if thread == "autotuned"} == {"benchmark", "channels_last_benchmark"}
    assert {"", "deterministic", "channels_last"} <= {name for thread, name in seen if thread != "autotuned"}
    convolutions = [op for op in found[0].ops if op.target in CONVOLUTIONS]
    assert convolutions
    assert all({"benchmark", "deterministic"} & {each.name for each in op.variants} for op in convolutions)


def test_equal_calls_of_another_step_are_not_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor those that do not run; what the autotuner had no time for is tried again."""
    measured: list[str] = []

    def profile(runner: UserRunner, calls: list[Any]) -> list[tuple[Kernel, ...]]:
        measured.extend(call.name for call in calls)
        return [(Kernel(name=f"k_{call.name}", dur_ns=900 if call.name else 1000, grid=(1, 1, 1)),) for call in calls]

    def works(runner: UserRunner, call: Any) -> bool:
        measured.append(f"{call.name}?")
        return bool(call.name != "deterministic")

    monkeypatch.setattr(variants, "_profile", profile)
    monkeypatch.setattr(variants, "_works", works)
    known: variants.Known = {}
    found: list[tuple[Trace, list[str]]] = []

    class Measuring(CpuExecutor):
        def with_variants(self, captured: Captured, trace: Trace, left_s: float, say: Callable[[str], None]) -> Trace:
            runner = UserRunner(captured, trace, self.device)
            runner.run_in_order()
            for tuning_s in (0.0, 1e4, 1e4):
                measured.clear()
                found.append((variants.with_variants_of(runner, say, known, tuning_s), list(measured)))
            return trace

    by_inductor(branches(), executor=Measuring(), frontends=("aten",))
    (early, first), (tuned, second), (again, third) = found[:3]
    assert "deterministic?" in first
    assert not any("benchmark" in name for name in first)
    assert {name.rstrip("?") for name in second} == {"benchmark", "channels_last_benchmark"}
    assert third == []
    assert again == tuned != early
