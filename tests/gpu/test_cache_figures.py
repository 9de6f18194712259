"""Figures of the rule for L2 misses: `gpusim calibrate -o` writes them into a hardware model."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

pytest.importorskip("torch")

import torch

from gpusim.cli import cli
from gpusim.formats.hardware import HardwareModel, Memory, load_hardware, read_hardware
from gpusim.formats.rules import read_rules
from gpusim.formats.trace import Gpu
from gpusim.gpu.calibrate import cache
from gpusim.gpu.calibrate import calibrate as calibration
from gpusim.gpu.calibrate.block_kernels import WORK, BlockBench
from gpusim.gpu.calibrate.cache import CHAIN, Reads, cache_figures, launch_miss_ns, read_rates
from gpusim.gpu.calibrate.contention import Fit, Measured
from gpusim.gpu.calibrate.stamps import Stamps
from gpusim.io.files import write_document
from gpusim.plan.cache_misses import lost_times_ns
from gpusim.plan.graph import OpGraph
from gpusim.policies.registry import POLICIES
from gpusim.trace.store import load_trace
from gpusim.units import MIB
from tests.support.recording_clock import Machine

ROOT = Path(__file__).parents[2]
H200 = load_hardware("h200")
FIGURES = ("l2_bytes_per_ns", "warp_l2_bytes_per_ns", "warp_dram_bytes_per_ns", "launch_miss_ns")
LAUNCH_MISS_NS = 150.0


class Reader:
    """Synthetic GPU: a warp reads 8 bytes a ns from L2 and 4 from DRAM, all at most 6,000 and 3,000."""

    sms = 100

    def __init__(self, _mhz: int = 0) -> None: ...

    def rates(self, parts: Sequence[tuple[str, int, int]]) -> list[float]:
        of_warp = {"l2": 8.0, "dram": 4.0}
        return [
            1000 / WORK[kind].chunk_bytes * min(blocks * warps * of_warp[kind], 750 * of_warp[kind])
            for kind, blocks, warps in parts
        ]


def without_figures(memory: Memory) -> Memory:
    return msgspec.structs.replace(memory, **dict.fromkeys(FIGURES, 0.0))


def test_figures_of_a_gpu_are_those_of_its_reads() -> None:
    found, notes = cache_figures(without_figures(H200.memory), read_rates(Reader()), LAUNCH_MISS_NS)
    assert [getattr(found, field) for field in FIGURES] == pytest.approx([6000.0, 8.0, 4.0, LAUNCH_MISS_NS])
    assert set(notes) == set(FIGURES)
    assert "8.00 on 3, 8.00 on 12" in notes["warp_l2_bytes_per_ns"]


def test_stored_reads_of_the_h200_give_the_figures_of_its_model() -> None:
    """But for rounding: its warp's rates were read off the table."""
    report = read_rules(ROOT / "research" / "data" / "rules_h200_20261123.json")
    (rule,) = (rule for rule in report.rules if rule.name == "bandwidth by SMs and warps")
    rates = {}
    for name, rate in rule.numbers.items():
        kind, sms, warps = name.split(", ")
        rates[Reads(kind, int(sms.split()[0]), int(warps.split()[0]))] = rate
    found, _ = cache_figures(without_figures(H200.memory), rates, H200.memory.launch_miss_ns)
    for field in FIGURES:
        assert getattr(found, field) == pytest.approx(getattr(H200.memory, field), rel=0.01), field


@pytest.mark.parametrize(("cache_mib", "read_mib"), [(60, 16), (48, 16), (40, 8), (6, 2), (4, 1)])
def test_work_in_the_cache_reads_at_most_a_third_of_it(cache_mib: int, read_mib: int) -> None:
    assert WORK["l2"].mask_within(cache_mib * MIB) == read_mib * MIB // 16 - 1
    assert WORK["latency"].mask_within(cache_mib * MIB) == read_mib * MIB // 4 - 1
    assert WORK["dram"].mask_within(cache_mib * MIB) == WORK["dram"].mask


def test_delay_of_a_launch_is_what_a_kernel_takes_longer_where_memory_is_touched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Kernels of 800 ns take 170 more in a graph that touches twice the cache; in one of three, launches never miss."""
    graphs = itertools.count()
    Machine(monkeypatch)
    monkeypatch.setattr(cache, "spin_cycles", lambda _us: 1)

    def chain_ns(_stamps: object, _lane: object, _call: object, touched: torch.Tensor) -> float:
        misses = touched.nbytes == 2 * 4096 and next(graphs) % 3 != 0
        return CHAIN * (800.0 + 170.0 * misses)

    monkeypatch.setattr(cache, "_chain_ns", chain_ns)
    assert launch_miss_ns(4096, torch.device("cpu")) == pytest.approx(170)


def test_time_of_a_chain_leaves_out_what_comes_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch)
    touched = SimpleNamespace(add_=lambda _: machine.work(10_000))
    stamps = Stamps(1, torch.device("cpu"))
    found_ns = cache._chain_ns(stamps, machine.lane(), partial(machine.work, 8), touched)  # type: ignore[arg-type]
    assert found_ns == CHAIN * 8


@pytest.fixture
def measured_edges(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace all that a calibration measures."""
    facts = Gpu(name=H200.gpu, driver="1", cuda="1", torch="1", cudnn="1", sm_clock_mhz=1980, mem_clock_mhz=1)
    limits = {name: getattr(H200.limits, field) for field, name in calibration.LIMITS_FROM_DRIVER.items()}
    properties = SimpleNamespace(total_memory=10**11, L2_cache_size=H200.memory.l2_bytes, **limits)
    notes = dict.fromkeys(msgspec.structs.asdict(H200.graph), "made up")
    stream_notes = dict.fromkeys(msgspec.structs.asdict(H200.stream), "made up")
    fit = Fit(0.3, 0.6, 0.9, 310.0, (0.01, 0.02), (0.03,))
    replaced: dict[str, Any] = {
        "require_gpu": lambda: None,
        "gpu_facts": lambda _busy: facts,
        "graph_costs": lambda base: (H200.graph, notes),
        "stream_costs": lambda: (H200.stream, stream_notes),
        "costs_with_kernels": lambda: (3000.0, 0.02),
        "CopyBench": object,
        "memset_waits_ns": lambda _bench: {"d2h": 1.0, "h2d": 2.0},
        "measure_points": lambda _model, _say: Measured((), (300.0,), (10.0,)),
        "fit": lambda _points, _gaps: fit,
        "BlockBench": Reader,
        "launch_miss_ns": lambda _bytes: LAUNCH_MISS_NS,
    }
    for name, value in replaced.items():
        monkeypatch.setattr(calibration, name, value)
    monkeypatch.setattr(calibration.bench, "host_copy_rates", lambda: (50.0, 50.0, 90.0, 3000.0))
    monkeypatch.setattr(calibration.bench, "copy_bandwidth", lambda: 2900.0)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device: properties)


@pytest.mark.usefixtures("measured_edges")
def test_calibrated_model_has_the_figures_and_turns_the_rule_on(tmp_path: Path) -> None:
    """Its base, another calibration, has no measured cache: losses to misses are not predicted with it."""
    earlier = {key: source for key, source in H200.sources.items() if key.removeprefix("memory.") not in FIGURES}
    base = msgspec.structs.replace(H200, name="before", memory=without_figures(H200.memory), sources=earlier)
    before, after = tmp_path / "before.json", tmp_path / "after.json"
    write_document(before, base, indent=1)
    done = CliRunner().invoke(cli, ["calibrate", "--base", str(before), "-o", str(after)])
    assert done.exit_code == 0, done.exception
    model = read_hardware(after)
    assert [getattr(model.memory, field) for field in FIGURES] == pytest.approx([6000.0, 8.0, 4.0, LAUNCH_MISS_NS])
    for field in FIGURES:
        assert model.sources[f"memory.{field}"].startswith("measured "), field
    assert "not measured by itself" in model.sources["memory.miss_ns"], "it is kept, with its source"

    def lost(hardware: HardwareModel) -> Any:
        graph = OpGraph.build(load_trace("googlenet-infer-b1"), hardware)
        return lost_times_ns(graph, POLICIES["critical_path"](graph, 4))

    assert not lost(read_hardware(before))
    assert lost(model)


@pytest.mark.gpu
def test_figures_measured_on_this_gpu_are_plausible() -> None:
    """Any GPU reads faster from its L2 cache than from DRAM, and a launch that misses takes longer."""
    rates = read_rates(BlockBench(1980))
    cache_bytes = torch.cuda.get_device_properties(0).L2_cache_size
    found, _ = cache_figures(without_figures(H200.memory), rates, launch_miss_ns(cache_bytes))
    assert found.l2_bytes_per_ns > max(rate for reads, rate in rates.items() if reads.kind == "dram")
    assert found.warp_l2_bytes_per_ns > found.warp_dram_bytes_per_ns
    assert 20 < found.launch_miss_ns < 1000


def test_costs_of_graphs_that_are_not_measured_are_those_of_the_base(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new one would else fall to its default, while its source says that it was kept."""
    lost = SimpleNamespace(limit_ns=lambda half: 700.0 + half)
    monkeypatch.setattr(calibration, "subjects", lambda: defaultdict(str))
    monkeypatch.setattr(calibration, "measure", lambda _: lost)
    monkeypatch.setattr(calibration, "fork_ns", lambda: 290.0)
    monkeypatch.setattr(calibration, "half_starts", lambda _: 2.0)
    for name in ("spin_cycles", "parallel_chains_ns", "small_kernel", "profiled_ns", "memset_gap_ns"):
        monkeypatch.setattr(calibration.bench, name, lambda *_, **__: 1000.0)
    costs, notes = calibration.graph_costs(H200.graph)
    kept = [name.removeprefix("graph.") for name in calibration.KEPT if name.startswith("graph.")]
    assert kept == ["join_ns", "product_frac", "turnover_ns"]
    assert all(getattr(costs, name) == getattr(H200.graph, name) > 0 for name in kept)
    assert {*notes, *kept} == {field.name for field in msgspec.structs.fields(costs)}
