"""Stream mode against a measured table of launches into many streams: predictions and their errors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import msgspec

from gpusim.engine.base import Engine
from gpusim.engine.fast import FastEngine
from gpusim.formats.hardware import HardwareModel
from gpusim.formats.hyper_q import HyperQ, HyperQCell, launch_order
from gpusim.formats.trace import Kernel
from gpusim.plan.tasks import Plan, Task
from gpusim.rules.occupancy import kernel_demand, kernel_footprint, kernel_occupancy


@dataclass(frozen=True)
class PredictedCell:
    """One case, measured and predicted, in units of one kernel's time."""

    cell: HyperQCell
    predicted: float

    @property
    def error(self) -> float:
        """Predicted / measured - 1."""
        return self.predicted / self.cell.units - 1.0


def predict_hyper_q(measured: HyperQ, hardware: HardwareModel, engine: Engine | None = None) -> list[PredictedCell]:
    """Simulate every case in stream mode, at the launch pace of its measurement, with nothing fitted.

    A measured time is that of all kernels over that of one, including the launch; both are simulated.
    """
    engine = engine or FastEngine()
    first_ns = measured.first_launch_ns

    def makespan_ns(streams: int, depth: int, depth_first: bool, model: HardwareModel, launch_ns: int) -> int:
        plan = spin_plan(streams, depth, depth_first, measured.spin_ns, model, launch_ns, first_ns)
        return engine.run(plan, model).makespan_ns

    predicted = []
    for cell in measured.cells:
        stream = msgspec.structs.replace(
            hardware.stream,
            queues=cell.connections,
            max_queues=max(cell.connections, hardware.stream.max_queues),
        )
        model = msgspec.structs.replace(hardware, stream=stream)
        alone_ns = makespan_ns(1, 1, False, model, measured.launch_ns)
        all_ns = makespan_ns(cell.streams, cell.depth, cell.depth_first, model, cell.launch_ns or measured.launch_ns)
        predicted.append(PredictedCell(cell, all_ns / alone_ns))
    return predicted


def hyper_q_markdown(measured: HyperQ, cells: Sequence[PredictedCell]) -> str:
    """Return measured, predicted and error as a table, one row per number of queues and case."""
    errors = sorted((abs(cell.error) for cell in cells), reverse=True)
    over = [cell for cell in cells if abs(cell.error) > 0.05]
    lines = [
        f"{measured.gpu}, {measured.date}; {measured.source}. Kernels of {measured.spin_ns / 1e6:.2f} ms, "
        f"{measured.launch_ns / 1e3:.1f} us from launch to launch. {len(cells)} cases, {len(cells) - len(over)} within "
        f"5 %, median error {errors[len(errors) // 2]:.1%}, largest {errors[0]:.1%}.",
        "",
        "| queues | streams | kernels in each | launched | measured | predicted | error |",
        "|--:|--:|--:|---|--:|--:|--:|",
    ]
    for _, group in groupby(cells, key=lambda row: row.cell.connections):
        for row in group:
            cell = row.cell
            order = "depth first" if cell.depth_first else "breadth first"
            error = f"**{row.error:+.1%}**" if abs(row.error) > 0.05 else f"{row.error:+.1%}"
            lines.append(
                f"| {cell.connections} | {cell.streams} | {cell.depth} | {order} | {cell.units:.2f} | "
                f"{row.predicted:.2f} | {error} |"
            )
    return "\n".join(lines) + "\n"


def spin_plan(
    streams: int,
    depth: int,
    depth_first: bool,
    spin_ns: float,
    hardware: HardwareModel,
    launch_ns: float = 0.0,
    first_launch_ns: float = 0.0,
) -> Plan:
    """Return the plan of one case: kernels of one block of one thread, like torch's spin kernel.

    The host takes `launch_ns` per launch (0: as in the hardware model), and `first_launch_ns` for the first.
    """
    kernel = Kernel(name="spin", dur_ns=round(spin_ns))
    spin = Task(
        name=kernel.name,
        dur_ns=spin_ns,
        demand=kernel_demand(hardware.limits, kernel),
        blocks=1,
        blocks_per_sm=kernel_occupancy(hardware.limits, kernel).blocks,
        footprint=kernel_footprint(hardware.limits, kernel),
        host_ns=launch_ns,
    )
    first, *rest = launch_order(streams, depth, depth_first)
    tasks = (
        msgspec.structs.replace(spin, queue=first, host_ns=first_launch_ns or launch_ns),
        *(msgspec.structs.replace(spin, queue=s) for s in rest),
    )
    return Plan(tasks=tasks, mode="stream")
