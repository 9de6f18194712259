"""Results shared by pages, computed once per hash of the trace, hardware and settings."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import gpusim
from gpusim.api import dashboard
from gpusim.api.dashboard import Sensitivities
from gpusim.api.resolve import resolve_schedule
from gpusim.defaults import (
    AS_OBSERVED,
    DEFAULT_LAUNCH,
    DEFAULT_POLICY,
    QUICK_BUDGET_S,
    QUICK_EVALUATIONS,
    RECOMMENDED,
    SEARCH,
)
from gpusim.report.breakdown import Breakdown, breakdown
from gpusim.units import counted
from gpusim_dashboard import kept, turns
from gpusim_dashboard.cache import cached
from gpusim_dashboard.choice import Choice

if TYPE_CHECKING:
    from gpusim.report.advice import Way

#: File name of a downloaded schedule in the commands shown on pages.
SCHEDULE_FILE = "best.json"
#: The policy used for a step that a searched schedule does not fit.
STAND_IN = DEFAULT_POLICY


def step_of(choice: Choice) -> gpusim.Step:
    """The step with its graph."""
    return _step(choice.content, choice.hardware.name, choice)


@cached
def _step(content: str, hardware: str, _choice: Choice) -> gpusim.Step:
    return gpusim.load(_choice.trace, _choice.hardware)


def breakdown_of(choice: Choice) -> Breakdown:
    """The breakdown of kernel time."""
    return _breakdown(choice.content, choice.hardware.name, step_of(choice))


@cached
def _breakdown(content: str, hardware: str, _step: gpusim.Step) -> Breakdown:
    return breakdown(_step.graph)


def explored_of(choice: Choice) -> gpusim.Explored:
    """The session's newest exploration of the trace, hardware and streams; else the short one."""
    mine = kept.own(choice)
    return quick_of(choice) if mine is None else mine


def quick_of(choice: Choice) -> gpusim.Explored:
    """The short exploration."""
    return _explored(choice.content, choice.hardware.name, choice.streams, choice)


@cached
def _explored(content: str, hardware: str, streams: int, _choice: Choice) -> gpusim.Explored:
    before = kept.load(_choice, *kept.QUICK)
    explored = kept.restore(before, step_of(_choice)) if before is not None else None
    if explored is None:
        with turns.work():
            explored = gpusim.explore(
                step_of(_choice), streams=streams, budget_s=QUICK_BUDGET_S, evaluations=QUICK_EVALUATIONS
            )
            together = concurrency_of(_choice, explored.best.schedule)
            kept.save(_choice, explored, breakdown_of(_choice), together, *kept.QUICK)
    return explored


@dataclass(frozen=True)
class Shown:
    """The schedule shown by pages about one schedule."""

    policy: str
    """A policy's name, or that of a search."""
    streams: int
    """Arguments of the policy."""
    schedule: gpusim.Schedule
    recommended: bool

    @property
    def searched(self) -> bool:
        """Whether it was searched, and so is valid only for its own step."""
        return self.policy not in dashboard.registered_policies()

    @property
    def observed(self) -> bool:
        """Whether it is the order of a profile, which no file and no policy gives."""
        return self.policy == AS_OBSERVED

    @property
    def used(self) -> int:
        """Number of streams in use."""
        return self.schedule.stream_count

    @property
    def words(self) -> list[str]:
        """Options of `gpusim simulate` that give it; a searched schedule is read from the Search page's file."""
        if self.searched:
            return ["--schedule", SCHEDULE_FILE]
        return ["--policy", self.policy, "--streams", str(self.streams)]

    @property
    def what_if(self) -> str | gpusim.Schedule:
        """Argument of a what-if question: the policy, which schedules the changed step anew, or the schedule itself."""
        return self.schedule if self.searched else self.policy

    @property
    def label(self) -> str:
        """Name on pages."""
        return f"{self.policy}, {counted(self.used, 'stream')}{' (recommended)' if self.recommended else ''}"


def recommended(explored: gpusim.Explored) -> Shown:
    """The schedule that an exploration recommends."""
    row = explored.best
    return Shown(row.policy, row.streams, row.schedule, True)


def shown_of(choice: Choice) -> Shown:
    """Return the chosen schedule: a policy's, the best searched one, or the recommended one.

    For a profile without data dependencies, the observed schedule is the recommended one.
    """
    if choice.policy in (RECOMMENDED, SEARCH):
        if not choice.searchable:
            schedule = dashboard.observed_schedule(step_of(choice))
            return Shown(schedule.policy, schedule.stream_count, schedule, False)
        explored = explored_of(choice)
        if choice.policy == RECOMMENDED:
            return recommended(explored)
        row = explored.best_of(SEARCH)
        return Shown(row.policy, row.streams, row.schedule, False)
    schedule = _schedule(choice.content, choice.hardware.name, choice.policy, choice.streams, step_of(choice))
    return Shown(choice.policy, choice.streams, schedule, False)


@cached
def _schedule(content: str, hardware: str, policy: str, streams: int, _step: gpusim.Step) -> gpusim.Schedule:
    with turns.work():
        return resolve_schedule(_step, policy, streams)


def times_of(choice: Choice, schedule: str | gpusim.Schedule) -> gpusim.Timeline:
    """The timeline of a schedule or a policy's schedule, with times and memory alone: by the compiled engine."""
    step = step_of(choice)
    return _times(choice.content, choice.hardware.name, resolve_schedule(step, schedule), step)


@cached
def _times(content: str, hardware: str, schedule: gpusim.Schedule, _step: gpusim.Step) -> gpusim.Timeline:
    with turns.work():
        return gpusim.simulate(_step, schedule).timeline


def timeline_of(choice: Choice, schedule: gpusim.Schedule, launch: str = DEFAULT_LAUNCH) -> gpusim.Timeline:
    """The timeline of a schedule, by the reference engine with all its records."""
    return _timeline(choice.content, choice.hardware.name, schedule, launch, step_of(choice))


@cached
def _timeline(
    content: str, hardware: str, schedule: gpusim.Schedule, launch: str, _step: gpusim.Step
) -> gpusim.Timeline:
    with turns.work():
        return gpusim.simulate(_step, schedule, launch=launch).recorded


def explained_of(choice: Choice, schedule: gpusim.Schedule, launch: str = DEFAULT_LAUNCH) -> gpusim.Explained:
    """Explain why a schedule is not faster; the timeline of a large step lacks the load of the GPU."""
    return _explained(choice.content, choice.hardware.name, schedule, launch, choice)


@cached
def _explained(
    content: str, hardware: str, schedule: gpusim.Schedule, launch: str, _choice: Choice
) -> gpusim.Explained:
    step = step_of(_choice)
    if dashboard.is_large(step):  # by the compiled engine
        with turns.work():
            return gpusim.explain(step, schedule, launch=launch)
    return dashboard.explained(step, schedule, timeline_of(_choice, schedule, launch))


def concurrency_of(choice: Choice, schedule: gpusim.Schedule) -> dashboard.Concurrency:
    """The modules that run at the same time in a schedule."""
    return _concurrency(choice.content, choice.hardware.name, schedule, choice)


@cached
def _concurrency(content: str, hardware: str, schedule: gpusim.Schedule, _choice: Choice) -> dashboard.Concurrency:
    with turns.work():
        return dashboard.concurrency(step_of(_choice), schedule)


def as_imported_of(choice: Choice) -> dashboard.AsImported:
    """The answers for a profile without data dependencies."""
    return _as_imported(choice.content, choice.hardware.name, step_of(choice))


@cached
def _as_imported(content: str, hardware: str, _step: gpusim.Step) -> dashboard.AsImported:
    return dashboard.as_imported(_step)


@dataclass(frozen=True)
class Question:
    """The settings of one column of the what-if page; `op` is an index of the trace's ops."""

    trace: str
    gpu: str
    launch: str
    streams: int
    sms: int
    bandwidth: float
    launch_cost: float
    contention: float
    queues: int
    op: int | None
    op_speed: float


def baseline_of(choice: Choice, shown: Shown) -> gpusim.Simulated:
    """The baseline of what-if questions: `gpusim simulate` of the schedule shown."""
    key = (choice.content, choice.hardware.name, shown.policy, shown.streams, hash(shown.schedule))
    return _baseline(*key, shown, step_of(choice))


@cached
def _baseline(
    content: str, hardware: str, policy: str, streams: int, schedule: int, _shown: Shown, _step: gpusim.Step
) -> gpusim.Simulated:
    return dashboard.changed(_step, _shown.what_if, streams=streams)


def answer_of(choice: Choice, question: Question, shown: Shown) -> gpusim.Simulated:
    """Simulate the changed step of a question."""
    # A searched schedule fits one step only; on a changed step a policy replaces it.
    own = not shown.searched or question.trace == choice.name
    what_if = shown.what_if if own else STAND_IN
    key = "" if isinstance(what_if, str) else hash(what_if)
    return _answer(choice.content, str(what_if) if key == "" else "", str(key), repr(question), what_if, question)


@cached
def _answer(
    content: str, policy: str, schedule: str, asked: str, _what_if: str | gpusim.Schedule, _question: Question
) -> gpusim.Simulated:
    changes = asdict(_question)
    name, gpu = changes.pop("trace"), changes.pop("gpu")
    return dashboard.changed(other_step(name, gpu), _what_if, **changes)


def other_step(name: str, gpu: str) -> gpusim.Step:
    """A step by name, on a GPU by name."""
    from gpusim_dashboard import choice as choosing

    return step_of(choosing.chosen(name, gpu, RECOMMENDED, 1))


def usual_question(choice: Choice, gpu: str, shown: Shown) -> Question:
    """The question that changes nothing but the GPU: every control of the what-if page at its default."""
    model = other_step(choice.name, gpu).hardware
    return Question(
        trace=choice.name,
        gpu=gpu,
        launch=DEFAULT_LAUNCH,
        streams=min(dashboard.MAX_STREAMS, shown.streams),
        sms=model.limits.sms,
        bandwidth=1.0,
        launch_cost=1.0,
        contention=1.0,
        queues=model.stream.queues,
        op=None,
        op_speed=1.0,
    )


def on_every_gpu(choice: Choice, shown: Shown) -> dict[str, gpusim.Simulated]:
    """Simulate the unchanged step on every GPU with a model; returns results by GPU name."""
    return {gpu: answer_of(choice, usual_question(choice, gpu, shown), shown) for gpu in gpusim.list_hardware()}


def sensitivities_of(choice: Choice, question: Question, base: gpusim.Simulated) -> Sensitivities:
    """Rows of the tornado chart for an answer."""
    return _sensitivities(choice.content, base.policy, repr(question), hash(base.schedule), base)


@cached
def _sensitivities(content: str, policy: str, asked: str, schedule: int, _base: gpusim.Simulated) -> Sensitivities:
    return dashboard.sensitivities(_base)


def limits_of(choice: Choice) -> gpusim.Limits:
    """The limits report."""
    return _limits(choice.content, choice.hardware.name, choice.streams, choice)


@cached
def _limits(content: str, hardware: str, streams: int, _choice: Choice) -> gpusim.Limits:
    with turns.work():
        return gpusim.limits(step_of(_choice), streams=streams)


@cached
def results_files(pattern: str = "*.json") -> dict[str, dashboard.Results]:
    """Results by file name, of all bundled replays; empty if none are bundled."""
    return dashboard.results(pattern)


def fused_ways_of(choice: Choice) -> list[Way]:
    """Measured times of fused kernels for this step on its GPU; empty if there are none.

    An upload has none: its name may belong to another network.
    """
    from gpusim.report.advice import fused_ways

    if choice.uploaded:
        return []
    return fused_ways(choice.trace.model, choice.hardware.gpu, results_files(dashboard.FUSED_RESULTS).values())
