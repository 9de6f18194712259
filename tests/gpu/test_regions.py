"""Steps with ATen's calls in some regions and Inductor's kernels in others, on the CPU: results equal eager's."""

from __future__ import annotations

import random
from collections.abc import Collection

import pytest
import torch

from gpusim.errors import CaptureError
from gpusim.formats.hardware import load_hardware
from gpusim.formats.trace import Mode, Op, Storage, Tensor, TensorInit, Trace
from gpusim.gpu.capture.rebuild import bare_trace
from gpusim.gpu.capture.record import Recorded
from gpusim.gpu.inductor.kernels import Compiling, functions_of
from gpusim.gpu.inductor.mixed import Mixer
from gpusim.gpu.inductor.regions import Regions, Step
from gpusim.gpu.inductor.step import inductor_step, with_values
from gpusim.gpu.optimize.arena_runner import ArenaRunner
from gpusim.gpu.optimize.race import Racing
from gpusim.gpu.replay.compare import errors
from gpusim.gpu.replay.execute import InitialState, Runner
from gpusim.gpu.replay.rounding import rounding_noise
from gpusim.plan.arena import pack
from gpusim.plan.graph import OpGraph
from gpusim.plan.sync import program_order_releases
from gpusim.policies.random_schedules import random_schedule
from gpusim.trace.check import check_trace
from tests.gpu.test_inductor import TOLERANCE, TRAINED
from tests.support.chains import with_chains
from tests.support.helpers import make_trace, with_kernels
from tests.support.networks import CPU, NETWORKS, OnCpu, fused_on_cpu, on_cpu

#: Random choices of regions per step, in addition to each region alone.
RANDOM = 2


class Mixing:
    """A captured step in both forms, and its mixed steps run."""

    def __init__(self, plain: OnCpu, kernels: OnCpu) -> None:
        self.plain, self.kernels = plain, kernels
        calls = Step("calls", plain.trace, plain.recorded)
        self.regions = Regions(calls, Step("kernels", kernels.trace, kernels.recorded))
        self.mixer = Mixer(self.regions)
        self._compiling = Compiling(kernels.trace.sources)
        recorded, trace = self.mixed(())
        runner = Runner(trace, CPU, own=True)
        state = InitialState.copy_of(recorded.initial)
        runner.bind(state.tensors)
        noise = rounding_noise(runner, state, program_order_releases(trace), 0)
        self._noise = {key: noise.get(index, 0.0) for key, index in self._results(recorded).items()}

    def mixed(self, fused: Collection[int]) -> tuple[Recorded, Trace]:
        recorded = with_values(self.mixer.mixed(fused).recorded, self.plain.recorded)
        return recorded, bare_trace(self.kernels.options, self.kernels.step, recorded, own=True)

    def check(self, fused: Collection[int], seed: int) -> None:
        """Run a mixed step as a random schedule's streams and events allow, in a poisoned arena."""
        recorded, trace = self.mixed(fused)
        timed = with_kernels(trace)
        check_trace(timed, "mixed")
        racing = Racing.of(
            graph := OpGraph.build(timed, load_hardware("h200")), random_schedule(graph, seed, seed=seed)
        )
        planned = racing.happens_before
        state = InitialState.copy_of(recorded.initial)
        functions = functions_of(trace, self._compiling)
        runner = ArenaRunner(timed, CPU, state.tensors, pack(timed, planned, kept=True), True, functions)
        torch.manual_seed(0)
        for op in planned.any_order(random.Random(seed)):
            runner.run(op)
        results = {index: runner.tensors[index] for index in recorded.final}
        noise = {index: self._noise[key] for key, index in self._results(recorded).items()}
        apart = errors(trace, results, recorded.final, noise, TOLERANCE)
        assert max(apart.values(), default=0.0) <= TOLERANCE, sorted(fused)

    def _results(self, recorded: Recorded) -> dict[object, int]:
        """Return the results of a step by names that all its forms share."""
        listed = {("result", place): index for place, index in enumerate([*recorded.outputs, *recorded.gradients])}
        return {**listed, **{name: index for index, name in recorded.named.items()}}

    def check_all(self) -> None:
        """Check each region alone, and some random choices."""
        draw = random.Random(0)
        count = len(self.regions.regions)
        chosen = [{number} for number in range(count)]
        chosen += [{number for number in range(count) if draw.random() < 0.5} for _ in range(RANDOM)]
        for seed, fused in enumerate(chosen):
            self.check(fused, seed)


@pytest.mark.parametrize("name", NETWORKS)
def test_any_choice_of_regions_gives_eagers_results(name: str) -> None:
    """Each region alone and random choices, in random orders that a schedule allows; freed bytes are poisoned."""
    mode: Mode = "train" if name in TRAINED else "infer"
    Mixing(on_cpu(name, mode), fused_on_cpu(name, mode)).check_all()


def test_the_layout_of_eager_has_borders_between_convolutions_and_the_kernels_behind_them() -> None:
    """Channels last, Inductor's images lie elsewhere in memory than eager's: then few regions can be exchanged."""
    plain = on_cpu("branches", "infer")
    recorded = inductor_step(plain.graph, plain.recorded, False, "given_layout")
    options = fused_on_cpu("branches", "infer").options
    kernels = OnCpu(options, plain.step, plain.graph, recorded, bare_trace(options, plain.step, recorded))
    mixing = Mixing(plain, kernels)
    other = Mixing(plain, fused_on_cpu("branches", "infer"))
    assert len(mixing.regions.regions) > len(other.regions.regions)
    mixing.check_all()


@pytest.mark.parametrize("name", ["heads", "branches"])
def test_calls_of_a_mixed_step_are_fused_as_those_of_aten(name: str) -> None:
    """Convolutions with what follows them, as variants that cover it, where the regions run ATen's calls."""
    mixing = Mixing(on_cpu(name, "infer"), fused_on_cpu(name, "infer"))
    recorded, trace = mixing.mixed(())
    timed = with_chains(with_kernels(trace))
    chosen = [len(op.variants) for op in timed.ops]
    assert any(chosen)
    runner = Runner(timed, CPU, own=True)
    runner.bind(InitialState.copy_of(recorded.initial).tensors)
    runner.choose(chosen)
    runner.run_in_order()
    results = {index: runner.tensors[index] for index in recorded.final}
    assert max(errors(trace, results, recorded.final, {}, TOLERANCE).values()) <= TOLERANCE


# --- The rules, by hand ---


class Hand:
    """A step made by hand: ops as "name: read > written", tensors by letters; capitals are states."""

    def __init__(self, ops: str, results: str = "z", **forms: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
        self.ids: dict[str, int] = {}
        self.tensors: list[Tensor] = []
        self.forms = forms
        self.ops = [self._op(text) for text in ops.split(";")]
        self.recorded = Recorded(
            ops=self.ops,
            tensors=self.tensors,
            storages=[Storage(bytes=64) for _ in self.tensors],
            outputs=[self.ids[name] for name in results],
            gradients=[],
            initial={},
            final={},
            named={index: name for name, index in self.ids.items() if name.isupper()},
        )
        fields = {"ops": tuple(self.ops), "tensors": tuple(self.tensors), "storages": tuple(self.recorded.storages)}
        made = make_trace([])
        self.trace = type(made)(**{name: getattr(made, name) for name in made.__struct_fields__} | fields)

    def _tensor(self, name: str) -> int:
        if name not in self.ids:
            self.ids[name] = len(self.tensors)
            shape, stride = self.forms.get(name, ((4, 4), (4, 1)))
            init = TensorInit(kind="normal") if name.isupper() else None
            self.tensors.append(
                Tensor(
                    shape=shape,
                    stride=stride,
                    dtype="float32",
                    storage=len(self.tensors),
                    role="activation",
                    name=name if init else "",
                    init=init,
                )
            )
        return self.ids[name]

    def _op(self, text: str) -> Op:
        name, _, uses = text.strip().partition(": ")
        read, _, written = uses.partition(">")
        reads, writes = (tuple(self._tensor(each) for each in part.split()) for part in (read, written))
        args = tuple({"tensor": index} for index in dict.fromkeys((*reads, *writes)))
        return Op(name=name, target=f"aten.{name}.default", args=args, reads=reads, writes=writes,
                  random=name.startswith("random"))  # fmt: skip


def regions(calls: Hand, kernels: Hand, alike: str = "") -> Regions:
    """Return the regions of two steps; `alike` has letters and calls: "a first" for a tensor with its result."""
    for each in filter(None, alike.split(",")):
        letter, call = each.split()
        kernels.recorded.alike.append((kernels.ids[letter], calls.ids[letter], call))
    return Regions(Step("calls", calls.trace, calls.recorded), Step("kernels", kernels.trace, kernels.recorded))


def grouped(found: Regions) -> set[tuple[str, str]]:
    """Return the names of the ops of each region."""
    names = [[op.name for op in step.trace.ops] for step in (found.calls, found.kernels)]
    return {
        (" ".join(names[0][i] for i in region.calls), " ".join(names[1][i] for i in region.kernels))
        for region in found.regions
    }


CHAIN = "first: X > a; second: a > z"


def test_a_value_in_the_same_form_is_a_border() -> None:
    assert grouped(regions(Hand(CHAIN), Hand(CHAIN), "a first")) == {("first", "first"), ("second", "second")}


def test_a_value_that_is_in_one_step_only_is_inside_a_region() -> None:
    fused = Hand("both: X > z")
    assert grouped(regions(Hand(CHAIN), fused)) == {("first second", "both")}
    assert grouped(regions(Hand(CHAIN), Hand(CHAIN))) == {("first second", "first second")}


@pytest.mark.parametrize(
    ("form", "is_border"),
    [
        (((4, 4), (4, 1)), True),
        (((2, 2, 4), (8, 4, 1)), True),  # the same elements in the same sequence
        (((1, 4, 4), (99, 4, 1)), True),  # a dimension of one element has any stride
        (((4, 4), (1, 4)), False),
        (((2, 8), (1, 2)), False),
        (((4, 4), (8, 1)), False),  # gaps
        (((2, 4), (4, 1)), False),  # a part of the memory
        (((4, 4), (0, 1)), False),  # elements that are there several times
    ],
)
def test_a_border_has_the_same_memory_in_both_steps(
    form: tuple[tuple[int, ...], tuple[int, ...]], is_border: bool
) -> None:
    found = regions(Hand(CHAIN), Hand(CHAIN, a=form), "a first")
    assert (len(found.regions) == 2) == is_border


def test_what_is_changed_in_place_is_a_border_with_its_last_value_only() -> None:
    """`change` rewrites what `first` wrote: its result is one, that of `first` is none."""
    calls = Hand("first: X > a; change: a > a; last: a > z")
    kernels = Hand("both: X > a; last: a > z")
    assert grouped(regions(calls, kernels, "a change")) == {("first change", "both"), ("last", "last")}
    kernels = Hand("both: X > a; last: a > z")
    assert grouped(regions(calls, kernels, "a first")) == {("first change last", "both last")}


def test_who_reads_a_value_before_its_last_change_is_of_its_region() -> None:
    calls = Hand("first: X > a; early: a > y; change: a > a; last: a y > z")
    kernels = Hand("both: X > a; early: X > y; last: a y > z")
    found = grouped(regions(calls, kernels, "a change,y early"))
    assert found == {("first early change", "both early"), ("last", "last")}


def test_a_buffer_that_two_kernels_write_is_no_border() -> None:
    kernels = Hand("first: X > a; again: a > a; second: a > z")
    assert len(regions(Hand(CHAIN), kernels, "a first").regions) == 1


def test_what_reads_a_state_before_its_change_is_apart_and_comes_first() -> None:
    """`early` reads the old state and `late` the new one, which belongs to the change."""
    text = "early: S > y; change: X > S; late: S y > z"
    found = regions(Hand(text), Hand(text), "y early")
    assert grouped(found) == {("early", "early"), ("change late", "change late")}
    kernels = Hand("change: X > S; late: X y > z; early: X > y", results="z")  # reads no old state: any time
    mixer = Mixer(found)
    for fused in ({0}, {1}):
        names = [op.name for op in mixer.mixed(fused).recorded.ops]
        assert names == ["early", "change", "late"]
    assert kernels.ids


def test_random_numbers_are_drawn_by_one_step_alone() -> None:
    text = "random_one: X > a; random_two: X > b; both: a b > z"
    found = regions(Hand(text), Hand(text), "a random_one,b random_two")
    assert grouped(found) == {("random_one random_two", "random_one random_two"), ("both", "both")}


def test_work_of_one_step_alone_is_refused() -> None:
    with pytest.raises(CaptureError, match="ops of one front end only"):
        regions(Hand("first: X > z; more: X > S"), Hand("first: X > z"))


def test_regions_that_wait_for_each_other_are_refused() -> None:
    """One kernel makes `a` and `z`; the calls make `b` from `a`, and `z` from `b`."""
    calls = Hand("first: X > a; middle: a > b; last: X b > z")
    kernels = Hand("middle: X > b; both: X b > a z")
    found = regions(calls, kernels, "a first,b middle")
    assert grouped(found) == {("first last", "both"), ("middle", "middle")}
    number = next(n for n, region in enumerate(found.regions) if len(region.calls) == 2)
    mixer = Mixer(found)
    with pytest.raises(CaptureError, match="wait for each other"):
        mixer.mixed({number})
    assert len(mixer.mixed({0, 1}).recorded.ops) == 2
