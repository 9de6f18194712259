"""`gpusim calibrate --rules`: reports of each experiment on a GPU that follows the rules, and on one that does not."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
from click.testing import CliRunner

from gpusim.cli import cli
from gpusim.cli.common import command_line
from gpusim.errors import MeasurementError, OptionError
from gpusim.formats.hardware import load_hardware
from gpusim.formats.rules import EXPERIMENTS, Rule, Rules, read_rules
from gpusim.formats.trace import Gpu
from gpusim.gpu.calibrate import dispatcher_rules as experiments
from gpusim.gpu.calibrate.block_kernels import WORK, Blocks, Hold
from gpusim.gpu.calibrate.start_interference import CONCURRENT_CHAINS, NETWORK, RUNS, Lost, Single, half_starts, judged
from gpusim.io.files import write_document
from gpusim.rules.occupancy import Footprint
from gpusim.validation.rules import print_rules, rules_markdown

H200 = load_hardware("h200")
LIMITS = H200.limits
SMS = 132


@dataclass
class Dispatcher:
    """Synthetic GPU that places blocks as the engines assume, unless told to break a rule."""

    sms: int = SMS
    timer_sms: frozenset[int] = frozenset()
    best_room: bool = True
    in_line: bool = True
    by_priority: bool = True
    with_carveouts: bool = True
    block_ns: float = 0.0
    """Time between the starts of a kernel's blocks, for which no other kernel waits."""
    gap_ns: Callable[[int, int], int] = lambda width, blocks: 800

    def place(self, holds: Sequence[Hold]) -> list[Blocks]:
        self.threads, self.blocks, self.smem, self.carveout = (np.zeros(self.sms, int) for _ in range(4))
        needs = [experiments._footprint((hold.threads, hold.smem_bytes // 1024), LIMITS) for hold in holds]
        left = [hold.blocks for hold in holds]
        rows: list[list[tuple[int, int, int]]] = [[] for _ in holds]
        ends: list[tuple[int, int, int]] = []
        arrivals = sorted({round(hold.delay_us * 1000) for hold in holds})
        while arrivals or ends:
            now = min([*arrivals[:1], *[end[0] for end in ends[:1]]])
            if arrivals and arrivals[0] == now:
                arrivals.pop(0)
            while ends and ends[0][0] == now:
                _, kernel, sm = heapq.heappop(ends)
                self._put(sm, needs[kernel], -1)
            arrived = [k for k, hold in enumerate(holds) if left[k] and round(hold.delay_us * 1000) <= now]
            for kernel in sorted(arrived, key=lambda k: (holds[k].priority * self.by_priority, holds[k].delay_us)):
                hold = holds[kernel]
                while left[kernel]:
                    number = hold.blocks - left[kernel]
                    room = self._room(needs[kernel])
                    sm = int(room.argmax()) if self.best_room else _next_with_room(room, number)
                    if room[sm] < 1:
                        break
                    lot = ((number * 2654435761) & 0xFFFFFFFF) >> 16
                    end = now + 100 + round(1000 * hold.hold_us) + round(lot * hold.vary_us * 1000 / 65536)
                    rows[kernel].append((sm, now + 100 + round(number * self.block_ns), end))
                    heapq.heappush(ends, (end, kernel, sm))
                    self._put(sm, needs[kernel], 1)
                    left[kernel] -= 1
                if left[kernel] and self.in_line:
                    break
        return [Blocks(*(tuple(column) for column in zip(*row, strict=True))) for row in rows]

    def chains(
        self, width: int, length: int, hold: Hold, beside: tuple[str, int, int] | None = None
    ) -> list[list[Blocks]]:
        gap_ns = self.gap_ns(width, hold.blocks) + (beside[1] if beside else 0)
        step = round(hold.hold_us * 1000) + gap_ns
        one = [Blocks((0,), (step * place,), (step * place + round(hold.hold_us * 1000),)) for place in range(length)]
        return [one] * width

    def rates(self, parts: Sequence[tuple[str, int, int]]) -> list[float]:
        return [blocks * min(warps, 8) / len(parts) for _, blocks, warps in parts]

    def _room(self, need: Footprint) -> npt.NDArray[np.int64]:
        room = np.minimum((LIMITS.threads_per_sm - self.threads) // need.threads, LIMITS.blocks_per_sm - self.blocks)
        if not self.with_carveouts:
            return np.minimum(room, (LIMITS.smem_per_sm_bytes - self.smem) // need.smem_bytes)
        split = np.where(self.blocks > 0, self.carveout, need.own_carveout_bytes)
        return np.where(split >= need.carveout_bytes, np.minimum(room, (split - self.smem) // need.smem_bytes), 0)

    def _put(self, sm: int, need: Footprint, sign: int) -> None:
        if not self.blocks[sm]:
            self.carveout[sm] = need.own_carveout_bytes
        self.threads[sm] += sign * need.threads
        self.smem[sm] += sign * need.smem_bytes
        self.blocks[sm] += sign


def _next_with_room(room: npt.NDArray[np.int64], number: int) -> int:
    """Take SMs in turn, whatever the room."""
    order = [(number + i) % len(room) for i in range(len(room))]
    return next((sm for sm in order if room[sm]), 0)


def test_gpu_that_follows_the_rules_is_said_to() -> None:
    found = {rule.name: rule for rule in experiments.rules(Dispatcher(), LIMITS)}
    assert list(found) == list(EXPERIMENTS[: len(found)])
    assert {name: rule.holds for name, rule in found.items()} == {
        "most room": True,
        "head of line": True,
        "room is taken at once": True,
        "priority": True,
        "block starts": True,
        "shared memory carve-out": True,
        "gap in a chain": True,
        "gap beside others": None,
        "bandwidth by SMs and warps": None,
        "sharing an SM": None,
    }
    assert found["gap in a chain"].found.startswith(
        "medians from 0.80 to 0.80 us; for one kernel at most 0.00 us apart"
    )
    assert found["gap beside others"].found == "800 ns alone, 20 to 120 ns more beside other kernels"
    assert found["sharing an SM"].numbers["fma 8 beside l2 8: fma"] == 2.0
    assert found["bandwidth by SMs and warps"].numbers["dram, 132 SMs, 8 warps"] == pytest.approx(132 * 8 * 4.096)


@pytest.mark.parametrize(
    ("gpu", "experiment", "text"),
    [
        (Dispatcher(best_room=False), experiments.most_room, "of 18 second kernels"),
        (Dispatcher(block_ns=0.11), experiments.block_starts, "second kernels started before the last block"),
        (Dispatcher(in_line=False), experiments.head_of_line, "75 of 75 blocks started before the last block"),
        (Dispatcher(by_priority=False), experiments.priorities, "of 132 blocks 0 overtook with higher priority"),
        (Dispatcher(with_carveouts=False), experiments.carveouts, "not: "),
    ],
)
def test_gpu_that_breaks_a_rule_is_found_out(gpu: Dispatcher, experiment: Callable[..., Rule], text: str) -> None:
    rule = experiment(gpu, LIMITS)
    assert rule.holds is False
    assert text in rule.found


def test_gap_that_grows_with_the_number_of_chains_breaks_the_rule() -> None:
    found = experiments.gaps(Dispatcher(gap_ns=lambda width, blocks: 800 + 40 * width), LIMITS)
    assert found.holds is False
    assert "at most 0.28 us apart" in found.found


def test_gap_may_differ_between_kernels_and_on_a_full_gpu() -> None:
    """Two chains of 528 blocks of 256 threads use all threads of 132 SMs; four would exceed them."""

    def gap_ns(width: int, blocks: int) -> int:
        return 900 + blocks // 4 + 260 * (blocks == 528 and width == 2)

    found = experiments.gaps(Dispatcher(gap_ns=gap_ns), LIMITS)
    assert found.holds
    assert found.found.startswith("medians from 0.90 to 1.29 us; for one kernel at most 0.00 us apart, but +0.26 us")
    assert list(found.numbers)[-2:] == ["528 blocks, 1 chains", "528 blocks, 2 chains"]


def lost(limit_ns: float, half: float = 2.0, runs_ns: float = 0.0) -> Lost:
    """Return the loss to each number of starts, by the rule."""
    starts = [0.2 * 1.7**number for number in range(len(CONCURRENT_CHAINS))]
    return Lost(3000.0, runs_ns, tuple((n, limit_ns * n / (n + half)) for n in starts))


def test_starts_that_cost_half_of_what_many_cost_are_found() -> None:
    """By the rule: of 900 ns a first start takes 900 x 1 / (1 + 2) = 300."""
    network = lost(900.0)
    assert half_starts(network) == 2.0
    assert network.limit_ns(2.0) == pytest.approx(900.0)
    assert half_starts(lost(500.0, half=0.7)) == 0.7


@pytest.mark.parametrize(
    ("runs_ns", "single", "holds"),
    [
        (20.0, Single(end_ns=5.0, start_ns=250.0, late_ns=-10.0), True),
        (300.0, Single(end_ns=5.0, start_ns=250.0, late_ns=-10.0), False),  # others need only run
        (20.0, Single(end_ns=260.0, start_ns=250.0, late_ns=-10.0), False),  # ends cost as much
    ],
)
def test_time_lost_beside_others_is_lost_to_their_starts(runs_ns: float, single: Single, holds: bool) -> None:
    found = judged({"GEMM": lost(800.0, runs_ns=runs_ns), NETWORK: lost(900.0, runs_ns=runs_ns)}, single)
    assert found.holds is holds
    assert found.numbers["busy_starts"] == 2.0
    assert found.numbers["GEMM: limit"] == pytest.approx(800.0)
    assert found.numbers[f"{NETWORK}: more beside {RUNS}"] == runs_ns


def test_blocks_are_spread_as_worked_out_by_hand() -> None:
    """2 SMs have 5 blocks of 256 threads and room for 12 of 64; one has 6, with room for 8: the first two get four each
    until all are level, then each gets one in turn.
    """
    assert experiments.spread([5, 6, 5], 256, 10, 64, LIMITS) == {(5, 5): 1, (5, 4): 1, (6, 1): 1}


def test_of_sms_with_as_much_room_one_where_a_block_has_ended_comes_first() -> None:
    """By hand: all are level after eight blocks, and the first two of the order get the ninth and tenth."""
    assert experiments.spread([5, 6, 5], 256, 10, 64, LIMITS, {2}) == {(5, 5): 1, (5, 4): 1, (6, 1): 1}
    assert experiments.spread([5, 6, 5], 256, 9, 64, LIMITS, {2}) == {(5, 5): 1, (5, 4): 1}
    assert experiments.spread([5, 6, 5], 256, 9, 64, LIMITS) == {(5, 4): 2, (6, 1): 1}


def test_work_kernels_have_all_their_places_filled() -> None:
    for kind, work in WORK.items():
        assert not {"SETUP", "CHUNK", "SINK"} & set(work.source.replace("(", " ").split()), kind


# --- The report ---


def test_calibrate_wants_to_know_what_to_write() -> None:
    done = CliRunner().invoke(cli, ["calibrate"])
    assert isinstance(done.exception, OptionError)
    assert "--rules FILE" in str(done.exception)


def report() -> Rules:
    gpu = Gpu(name="G", driver="1", cuda="1", torch="1", cudnn="1", sm_clock_mhz=1980, mem_clock_mhz=3201)
    rules = (
        Rule(name="a", rule="so it is", holds=True, found="seen", numbers={"x": 1.0}),
        Rule(name="b", rule="so it is not", holds=False, found="other", numbers=dict.fromkeys("pqrs", 2.0)),
    )
    return Rules(schema="gpusim-rules/1", gpu=gpu, date="2026-01-02", command="gpusim calibrate", rules=rules)


def test_report_is_written_read_and_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "r.json"
    write_document(path, report())
    found = read_rules(path)
    assert found == report()
    print_rules(found, H200)
    assert "does not hold" in capsys.readouterr().out
    text = rules_markdown(found, H200, path.name)
    assert "| b | so it is not | does not hold | other |" in text
    assert "| p | 2 |" in text
    write_document(path, msgspec.structs.replace(found, schema="gpusim-rules/2"))
    with pytest.raises(MeasurementError, match="unknown schema version"):
        read_rules(path)


def test_command_in_a_report_has_no_folders_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["--rules", "/home/me/out/r.json", "--base=/tmp/h.json", "-o", "results/a.json", "/x/net.py:f", "a/b=c"]
    monkeypatch.setattr("sys.argv", ["/usr/bin/gpusim", "calibrate", *words])
    assert command_line() == "gpusim calibrate --rules r.json --base=h.json -o results/a.json net.py:f a/b=c"
