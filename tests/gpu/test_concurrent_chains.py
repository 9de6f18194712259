"""Chains of equal and of different calls side by side: what `gpusim calibrate --rules` measures and says of them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

pytest.importorskip("torch")

import torch

from gpusim.analysis.concurrent_chains import TOLERANCE, Chain, compare, judge, predict, task_of
from gpusim.cli import cli
from gpusim.engine.reference import ReferenceEngine
from gpusim.errors import MeasurementError, OptionError, UnknownNameError
from gpusim.formats.concurrent_chains import ChainsBeside, ConcurrentChains
from gpusim.formats.hardware import HardwareModel, load_hardware
from gpusim.formats.rules import (
    CHANNELS_LAST,
    EXPERIMENTS,
    LAUNCHES,
    ROWS_BY_INDEX,
    SMALL_BLOCKS,
    SMALL_PRODUCTS,
    START_INTERFERENCE,
    Rules,
    read_rules,
)
from gpusim.formats.trace import Gpu, Kernel
from gpusim.gpu.calibrate import concurrent_chains, dispatcher_rules
from gpusim.gpu.calibrate import rules as checked_rules
from gpusim.gpu.calibrate.concurrent_chains import CALLS, RECORDINGS, STREAMS, ChainBench, measure
from gpusim.io.files import write_document
from gpusim.plan.kernels import Fits
from gpusim.validation.rules import rules_markdown
from tests.support.helpers import make_hardware
from tests.support.recording_clock import Machine

H200 = load_hardware("h200")
SMS = H200.limits.sms
EMPTY_NS = 1000.0
#: Kernels of a call: a product of few blocks, one of as many as SMs, and a call of two kernels and a memset.
KERNELS = {
    "few": (Kernel(name="gemm", dur_ns=6000, grid=(24, 1, 1), block=(384, 1, 1), smem_bytes=100_000),),
    "all": (Kernel(name="gemm", dur_ns=9000, grid=(SMS, 1, 1), block=(128, 1, 1), smem_bytes=40_000),),
    "split": (
        Kernel(name="gemm", dur_ns=3000, grid=(64, 1, 1), block=(128, 1, 1), smem_bytes=40_000),
        Kernel(name="reduce", dur_ns=1000, grid=(16, 1, 1), block=(256, 1, 1)),
        Kernel(name="Memset (Device)", kind="memset", dur_ns=800, bytes=64),
    ),
}


@dataclass(frozen=True)
class Token:
    """A call of one kind, on operands of its own."""

    kind: str
    number: int

    def __call__(self) -> None: ...


class SimulatedBench:
    """A GPU that follows the engines' rules with other constants; `more` is what it takes longer beside others."""

    def __init__(self, truth: HardwareModel, more: float = 1.0, products: bool = True) -> None:
        self.truth, self.more, self.products = truth, more, products
        self.ran: list[list[tuple[Token, int]]] = []

    def kernels(self, calls: Sequence[Any]) -> list[tuple[Kernel, ...]]:
        return [KERNELS[call.kind] for call in calls]

    def time_ns(self, chains: Sequence[tuple[Any, int]]) -> float:
        self.ran.append(list(chains))
        if not chains:
            return EMPTY_NS
        found = predict([self.chain(*chain) for chain in chains], EMPTY_NS, self.truth, ReferenceEngine())
        return found if len(chains) == 1 else EMPTY_NS + self.more * (found - EMPTY_NS)

    def chain(self, call: Token, number: int) -> Chain:
        """Return a chain whose kernels take their profiled times."""
        tasks = tuple(task_of(Fits(self.truth), kernel, self.products) for kernel in KERNELS[call.kind])
        return Chain(tasks, sum(task.dur_ns + task.extra_ns + self.truth.graph.chain_ns for task in tasks), number)


def makers() -> Mapping[str, Callable[[], Any]]:
    numbers = iter(range(1000))
    return {kind: partial(lambda kind: Token(kind, next(numbers)), kind) for kind in KERNELS}


@functools.cache
def measured(more: float = 1.0, matrix_exponent: float = H200.contention.matrix_exponent) -> ConcurrentChains:
    contention = msgspec.structs.replace(H200.contention, matrix_exponent=matrix_exponent)
    truth = msgspec.structs.replace(H200, contention=contention)
    return measure(SMALL_PRODUCTS, makers(), SimulatedBench(truth, more))


def test_each_chain_has_its_own_operands_and_different_ones_take_as_long() -> None:
    bench = SimulatedBench(H200)
    found = measure(SMALL_PRODUCTS, makers(), bench)
    for chains in bench.ran:
        assert len({call for call, _ in chains}) == len(chains)
    assert [len(run.chains) for run in found.runs] == [*STREAMS, *STREAMS, *STREAMS, len(KERNELS)]
    *equal, different = found.runs
    assert all(set(run.calls) == {CALLS} and len(set(run.chains)) == 1 for run in equal)
    assert different.chains == tuple(KERNELS)
    call_ns = {call.name: call.call_ns for call in found.calls}
    lengths_ns = [number * call_ns[kind] for kind, number in zip(different.chains, different.calls, strict=True)]
    assert max(lengths_ns) <= 1.05 * min(lengths_ns)
    gap_ns, memset_ns = H200.graph.chain_ns, H200.graph.memory_node_ns
    wanted_ns = {"few": 6000 + gap_ns, "all": 9000 + gap_ns, "split": 4800 + 3 * gap_ns + memset_ns}
    assert call_ns == pytest.approx(wanted_ns, abs=1)


def test_time_of_chains_is_that_of_all_their_calls_between_the_stamps(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine that runs one kernel at a time: 3 x 40 + 5 x 100 ns. Chains wait for the first, and it for them."""
    machine = Machine(monkeypatch)
    bench = ChainBench(torch.device("cpu"))
    found_ns = bench.time_ns([(partial(machine.work, 40), 3), (partial(machine.work, 100), 5)])
    assert found_ns == 620
    assert machine.waits == [(1, 0), (0, 1)] * RECORDINGS
    assert bench.time_ns([]) == 0


def test_chain_alone_is_predicted_to_take_what_it_took() -> None:
    for kernels in KERNELS.values():
        chain = Chain(tuple(task_of(Fits(H200), kernel) for kernel in kernels), 12_345.0, 7)
        assert predict([chain], EMPTY_NS, H200, ReferenceEngine()) == pytest.approx(EMPTY_NS + 7 * 12_345, abs=1)


@pytest.mark.parametrize(("blocks", "wanted"), [(SMS // 2, 1.0), (SMS, 2.0)])
def test_two_chains_take_the_time_of_the_hand_worked_cases(blocks: int, wanted: float) -> None:
    """On SMs of their own nothing is lost; a kernel that leaves no room on any SM makes the other wait."""
    hardware = make_hardware(sharing=1.0, matrix=1.0)
    kernel = Kernel(name="gemm", dur_ns=5000, grid=(blocks, 1, 1), block=(1024, 1, 1), smem_bytes=120_000)
    chain = Chain((task_of(Fits(hardware), kernel),), 5000.0, 10)
    assert predict([chain] * 2, 0.0, hardware, ReferenceEngine()) == pytest.approx(wanted * 50_000, rel=0.001)


def test_gpu_that_follows_the_rules_is_said_to_lack_none() -> None:
    rule = judge(measured(), H200, ReferenceEngine())
    assert rule.holds
    assert rule.name == SMALL_PRODUCTS
    assert rule.found.endswith(f"All are within {TOLERANCE:.0%}: nothing is missing")
    assert rule.numbers["few, 8 streams: measured"] == pytest.approx(
        rule.numbers["few, 8 streams: predicted"], rel=1e-4
    )
    assert set(rule.numbers) == {
        f"{name}, {streams} streams: {what}"
        for name, streams in [*((kind, n) for kind in KERNELS for n in STREAMS), ("different ones", len(KERNELS))]
        for what in ("measured", "predicted")
    }


@pytest.mark.parametrize(
    ("more", "error", "text"),
    [
        (1.25, "-20.0%", "10 of 10 come out more than 5% too fast, 0 too slow; no rule covers it"),
        (0.8, "+25.0%", "0 of 10 come out more than 5% too fast, 10 too slow; no rule covers it"),
    ],
)
def test_time_that_the_model_lacks_is_found(more: float, error: str, text: str) -> None:
    """Where chains side by side take 1.25 times as long, 1 / 1.25 of it is predicted: 20 % too fast."""
    rule = judge(measured(more), H200, ReferenceEngine())
    assert rule.holds is False
    assert f"medians by streams: {error} on 2, {error} on 4, {error} on 8, " in rule.found
    assert text in rule.found


def test_loss_on_shared_sms_alone_is_told_from_others() -> None:
    """With a larger exponent the GPU loses where products share SMs: 8 chains of 24 blocks, not 2."""
    experiment = measured(matrix_exponent=0.9)
    found = {(each.name, each.streams): each.error for each in compare(experiment, H200, ReferenceEngine())}
    assert found["few", 2] == pytest.approx(0.0, abs=1e-3)
    assert found["few", 8] < -0.02
    assert found["all", 8] < -0.1


@pytest.mark.parametrize(("name", "products"), [(SMALL_PRODUCTS, True), (CHANNELS_LAST, False)])
def test_only_products_lose_time_beside_others(name: str, products: bool) -> None:
    """GEMM-like kernels of convolutions have no such loss, whatever their names say.

    Different chains end at about the same time, so what runs beside the last kernels depends on rounding.
    """
    experiment = measure(name, makers(), SimulatedBench(H200, products=products))
    for each in compare(experiment, H200, ReferenceEngine()):
        assert each.error == pytest.approx(0.0, abs=1e-3 if each.equal else 0.02), each.name


# --- The report ---


def report(*chains: ConcurrentChains) -> Rules:
    gpu = Gpu(name="G", driver="1", cuda="1", torch="1", cudnn="1", sm_clock_mhz=1980, mem_clock_mhz=1)
    rules = tuple(judge(each, H200, ReferenceEngine()) for each in chains)
    return Rules(schema="gpusim-rules/1", gpu=gpu, date="2026-01-02", command="c", rules=rules, chains=chains)


def test_stored_chains_are_predicted_again_without_a_gpu(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    write_document(path, report(measured(1.25)))
    found = read_rules(path)
    (again,) = (judge(each, H200, ReferenceEngine()) for each in found.chains)
    assert again == found.rules[0]
    text = rules_markdown(found, H200, path.name)
    assert "| small products | chains side by side lose" in text
    assert "| few, 8 streams: measured |" in text


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"chains": ("few", "none")}, "has a chain of 'none', which is not among the calls"),
        ({"calls": (3,)}, "has 2 chains, and 1 numbers of calls"),
        ({"together_ns": 900.0}, "takes 900.0 ns, no more than what is not its own"),
    ],
)
def test_chains_that_do_not_fit_are_refused(changes: dict[str, Any], text: str, tmp_path: Path) -> None:
    good = measured()
    right = ChainsBeside(chains=("few", "few"), calls=(3, 3), together_ns=5000.0)
    runs = (right, msgspec.structs.replace(right, **changes))
    document = report(good)
    broken = msgspec.structs.replace(document, chains=(msgspec.structs.replace(good, runs=runs),))
    write_document(tmp_path / "r.json", broken)
    with pytest.raises(MeasurementError, match="chains") as caught:
        read_rules(tmp_path / "r.json")
    assert text in str(caught.value)
    assert "$.chains[0].runs[1]" in str(caught.value)


def test_an_experiment_without_runs_or_twice_is_refused(tmp_path: Path) -> None:
    good, path = measured(), tmp_path / "r.json"
    write_document(path, msgspec.structs.replace(report(good), chains=(msgspec.structs.replace(good, runs=()),)))
    with pytest.raises(MeasurementError, match=r"\$\.chains\[0\]\.runs"):
        read_rules(path)
    write_document(path, msgspec.structs.replace(report(good), chains=(good, good)))
    with pytest.raises(MeasurementError, match=r"\$\.chains\[1\]\.name: is the second experiment"):
        read_rules(path)


# --- Which experiments run ---


@pytest.fixture
def experiments_ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replace all experiments, and return the names of those that run."""
    ran: list[str] = []
    gpu = report().gpu
    rule = judge(measured(), H200, ReferenceEngine())

    def stand_in(name: str) -> Any:
        def run(*_: object) -> Any:
            ran.append(name)
            return rule

        return run

    for table in (dispatcher_rules.JUDGES, dispatcher_rules.MEASUREMENTS):
        for name in table:
            monkeypatch.setitem(table, name, stand_in(name))  # type: ignore[arg-type]
    monkeypatch.setattr(checked_rules, "require_gpu", lambda: None)
    monkeypatch.setattr(checked_rules, "gpu_facts", lambda _busy: gpu)
    monkeypatch.setattr(checked_rules, "BlockBench", lambda _mhz: None)
    monkeypatch.setattr(checked_rules, "check_interference", stand_in(START_INTERFERENCE))
    monkeypatch.setattr(checked_rules, "measure_hyper_q", lambda *_: ran.append(LAUNCHES))

    def chains(experiment: concurrent_chains.Experiment) -> ConcurrentChains:
        ran.append(experiment.name)
        return msgspec.structs.replace(measured(), name=experiment.name)

    monkeypatch.setattr(concurrent_chains, "run", chains)
    return ran


def test_all_experiments_run_in_the_order_of_the_report(experiments_ran: list[str]) -> None:
    found = checked_rules.check_rules(H200, "c")
    assert tuple(experiments_ran) == EXPERIMENTS
    assert [each.name for each in found.chains] == [SMALL_PRODUCTS, CHANNELS_LAST, ROWS_BY_INDEX, SMALL_BLOCKS]


def test_only_the_experiments_that_were_asked_for_run(experiments_ran: list[str], tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    words = ["calibrate", "--rules", str(path), "--only", "small-products", "--only", "channels-last-convolutions"]
    done = CliRunner().invoke(cli, words)
    assert done.exit_code == 0, done.exception
    assert experiments_ran == [SMALL_PRODUCTS, CHANNELS_LAST]
    found = read_rules(path)
    assert [rule.name for rule in found.rules] == [SMALL_PRODUCTS, CHANNELS_LAST]
    assert found.hyper_q is None
    assert "| channels-last convolutions |" in path.with_suffix(".md").read_text()


@pytest.mark.parametrize(
    ("words", "error", "text"),
    [
        (("--only", "small-products"), OptionError, "--only goes with --rules FILE"),
        (("--only", "small-product", "--rules", "r.json"), UnknownNameError, "did you mean 'small-products'"),
    ],
)
def test_wrong_names_of_experiments_are_refused_first(words: Sequence[str], error: type, text: str) -> None:
    done = CliRunner().invoke(cli, ["calibrate", *words])
    assert isinstance(done.exception, error)
    assert text in str(done.exception)


def test_rows_by_index_are_gathered_and_added(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, with the smallest of their sizes."""
    on_cpu = {name: partial(getattr(torch, name), device="cpu") for name in ("randn", "randint", "zeros", "empty")}
    for name, make in on_cpu.items():
        monkeypatch.setattr(torch, name, lambda *sizes, make=make, device: make(*sizes))
    gather, *_, addition, _, _ = (make() for make in concurrent_chains.rows_by_index().values())
    x, _, index = gather.args
    assert torch.equal(gather(), x[index])
    total = addition()
    _, index, rows = addition.args
    wanted = torch.stack([rows[index == row].sum(0) for row in range(len(total))])
    assert torch.allclose(total, wanted, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("experiment", concurrent_chains.EXPERIMENTS, ids=lambda each: each.name)
def test_chains_on_this_gpu_take_between_one_and_as_many_times_their_time(
    experiment: concurrent_chains.Experiment,
) -> None:
    """Chains side by side are neither faster than one, nor, but for noise, slower than one after the other."""
    few = dict(list(experiment.make().items())[:2])
    found = concurrent_chains.run(replace(experiment, make=lambda: few), ChainBench())
    for each in compare(found, H200, ReferenceEngine()):
        assert 0.9 < each.measured < 1.3 * each.streams
        assert each.predicted > 0.9
