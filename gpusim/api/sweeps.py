"""Functions of sweeps beyond the public API: what names stand for, files for workers, many schedules of one step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from gpusim.defaults import DEFAULT_ENGINE
from gpusim.engine.base import engine_by_name
from gpusim.engine.evaluate import Evaluation as Evaluation
from gpusim.engine.evaluate import Evaluator
from gpusim.engine.threads import cores as cores
from gpusim.errors import HardwareError, SweepError
from gpusim.formats.hardware import SCHEMA, HardwareModel
from gpusim.formats.hardware import bundled_hardware as bundled_hardware
from gpusim.formats.hardware import default_hardware as default_hardware
from gpusim.formats.hardware import read_hardware as read_hardware
from gpusim.formats.sweep import ALL as ALL
from gpusim.formats.sweep import Sweep as Sweep
from gpusim.formats.trace import Trace as Trace
from gpusim.io.files import decode_document, read_toml
from gpusim.plan.schedule import Schedule
from gpusim.policies.registry import POLICIES, RegisteredPolicy, policy_by_name
from gpusim.step import Step
from gpusim.trace.store import TRACE_SUFFIXES as TRACE_SUFFIXES
from gpusim.trace.store import bundled_traces as bundled_traces
from gpusim.trace.store import parse_trace as parse_trace

if TYPE_CHECKING:
    from gpusim.bounds.bounds import Bounds as Bounds


def check_engine(name: str) -> None:
    """Raise `UnknownNameError` for an engine that does not exist."""
    engine_by_name(name)


def registered_policies() -> Mapping[str, RegisteredPolicy]:
    """Return the policies by name."""
    return POLICIES


def read_sweep_file(path: Path) -> Sweep:
    """Read a sweep file, without its names. Raises `SweepError`."""
    return read_toml(path, Sweep, SweepError)


def step_of_contents(trace: bytes, hardware: bytes) -> Step:
    """Return the step of the contents of a trace file and a hardware model. Raises `TraceError`, `HardwareError`."""
    model = decode_document(hardware, HardwareModel, SCHEMA, "hardware", HardwareError)
    return Step(parse_trace(trace, "trace"), model)


@dataclass(frozen=True)
class Simulations:
    """Simulations of many schedules of one step, with the times of `gpusim.simulate`; shared work is done once."""

    step: Step
    engine: str = DEFAULT_ENGINE

    @cached_property
    def sequential_ns(self) -> int:
        """Predicted time of the sequential graph. Raises as `simulate` does."""
        with self.step.naming():
            return self._evaluator.makespan_ns(Schedule.in_recorded_order(len(self.step.graph)))

    @cached_property
    def bounds(self) -> Bounds:
        """Lower bounds of the captured kernels."""
        from gpusim.bounds.bounds import bounds

        return bounds(self.step.graph)

    def simulate(self, policy: str, streams: int) -> Evaluation:
        """Return makespan and peak memory of a policy. Raises `UnknownNameError`, and `TraceError` for the step."""
        with self.step.naming():
            return self._evaluator.evaluate(policy_by_name(policy)(self.step.graph, streams))

    @cached_property
    def _evaluator(self) -> Evaluator:
        return Evaluator(self.step.graph, self.engine)
