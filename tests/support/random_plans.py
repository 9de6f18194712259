"""Random plans full of ties, with hardware to run them on, for comparing both engines."""

from __future__ import annotations

import random
from dataclasses import fields

import msgspec

from gpusim.formats.hardware import HardwareModel
from gpusim.plan.tasks import LaunchMode, Plan, Task
from gpusim.rules.occupancy import NO_DEMAND, NO_FOOTPRINT, Demand, Footprint
from tests.support.helpers import make_hardware

#: Blocks of a kernel per SM, and their needs: small and large, with and without shared memory, or unknown.
BLOCKS = (
    (8, Footprint(256, 6144, 1024, 8192, 32768)),
    (2, Footprint(1024, 32768, 1024, 8192, 8192)),
    (10, Footprint(64, 6144, 7552, 102400, 135168)),
    (2, Footprint(128, 12288, 99328, 200704, 200704)),
    (1, Footprint(384, 64512, 232448, 233472, 233472)),
    (16, Footprint(128, 0, 0, 0, 16384)),
    (0, NO_FOOTPRINT),
)
PARTITION_SMS = {0: 32, 1: 24, 2: 40, 5: 36}


def random_plan(seed: int, tasks: int, mode: LaunchMode, alone: bool = False) -> tuple[Plan, HardwareModel]:
    """Make a plan and hardware with many ties: few different times, zeros, devices, partitions, priorities.

    `alone` plans are on one GPU and have no copies: in graph mode the event loop is compiled without these.
    Now and then a dependency comes twice or points to a later task. The plan of fewer tasks begins that of more, so
    that hypothesis can shrink it; a strategy that draws each field would take most of the test's time.
    """
    dice = random.Random(seed)
    pick = dice.choice
    times_ns = pick(
        ((0.0, 1.0, 100.0), (0.0, 0.3, 7.7, 100.0, 405.3, 1234.5), tuple(dice.uniform(0, 9e3) for _ in "1234"))
    )
    parts = (0.0, 0.01, 0.1, 0.25, 0.3, 0.5, 0.75, 1.0)
    devices, queues, backward = pick((1,) if alone else (1, 1, 2, 3)), dice.randint(1, 6), pick((0.0, 0.0, 0.03))
    partitions = pick(((0,), (0,), (0, 1), (0, 0, 1, 2), (2, 5)))
    hardware = make_hardware(
        chain_ns=pick((0.0, 100.0, 405.3)),
        fork_ns=pick((0.0, 30.0)),
        join_ns=pick((0.0, 40.0)),
        busy_ns=pick((0.0, 60.0)),
        busy_starts=pick((0.0, 1.7)),
        product_frac=pick((0.0, 0.3)),
        branch_ns=pick((0.0, 45.0)),
        front_end_ns=pick((0.0, 100.0, 250.0, 333.3)),
        turnover_ns=pick((0.0, 0.9)),
        slowdown=pick((0.0, 0.8)),
        sharing=pick((0.0, 0.5, 0.55, 1.0)),
        matrix=pick((0.0, 0.3, 1.0)),
        cross=pick((1.0, 0.6, 0.0)),
        launch_ns=pick((0.0, 100.0, 5000.0)),
        start_ns=pick((0.0, 2000.0)),
        stream_chain_ns=pick((0.0, 405.3)),
        event_ns=pick((0.0, 3000.0)),
        event_host_ns=pick((0.0, 2000.0)),
        queues=pick((1, 2, 3, 8, 32)),
        copy_latency_ns=pick((0.0, 100.0, 2000.0)),
        both=pick((60.0, 100.0)),
        switch_ns=pick((0.0, 0.0, 55.5)),
        kernel_slowdown=pick((0.0, 0.0, 0.07, 0.5)),
        copy_slowdown=pick((0.0, 0.0, 0.17, 1.0)),
        memset_d2h_ns=pick((0.0, 100.0, 405.3)),
        memset_h2d_ns=pick((0.0, 100.0, 1000.0)),
    )
    limits = msgspec.structs.replace(hardware.limits, resident_grids=pick((128, 128, 1, 2, 3)))
    kinds = ("kernel", "kernel", "kernel", "kernel", "memset", *(() if alone else ("h2d", "d2h", "h2d")))
    drawn: list[Task] = []
    for index in range(tasks):
        deps = dice.sample(range(index), min(index, pick((0, 0, 1, 2, 3))))
        if deps and dice.random() < 0.05:
            deps.append(deps[0])
        if dice.random() < backward:
            deps.append(index + dice.randrange(4))  # itself, a later task, or one too many
        kind = pick(kinds)
        partition = pick(partitions)
        per_sm, footprint = pick(BLOCKS) if kind == "kernel" else (0, NO_FOOTPRINT)
        drawn.append(
            Task(
                name=f"t{index}",
                kind=kind,  # type: ignore[arg-type]
                device=dice.randrange(devices),
                queue=dice.randrange(queues),
                deps=tuple(deps),
                dur_ns=(dur_ns := pick(times_ns)),
                missed_ns=pick((0.0, 0.0, 0.4)) * dur_ns,
                extra_ns=pick((0.0, 0.0, 50.0)),
                idle_ns=pick((0.0, 0.0, 0.0, 290.9)),
                demand=Demand(*(pick(parts) for _ in fields(Demand))) if kind == "kernel" else NO_DEMAND,
                dram_bytes=pick((0.0, 1e3, 1e6)),
                copy_bytes=pick((0, 0, 100, 5000, 100_000)),
                on_copy_engine=kind == "memset" and pick((True, True, False)),
                host_ns=pick((0.0, 0.0, 10.0, 700.0)),
                partition=partition,
                partition_sms=PARTITION_SMS[partition] if len(set(partitions)) > 1 else 0,
                blocks=pick((1, 3, 75, 132, 300, 784, 3000)) if per_sm else 0,
                blocks_per_sm=per_sm,
                footprint=footprint,
                matrix=bool(per_sm) and pick((False, True)),
                product=pick((False, True)),
            )
        )
    return Plan(tuple(drawn), mode), msgspec.structs.replace(hardware, limits=limits)
