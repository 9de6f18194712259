"""Results that pages share, each computed once: cached under the hash of the trace, the hardware and the settings."""

from __future__ import annotations

from dataclasses import dataclass, replace

import gpusim
from gpusim.api import resolve_schedule
from gpusim.defaults import DEFAULT_POLICY, QUICK_BUDGET_S, QUICK_EVALUATIONS, RECOMMENDED
from gpusim.errors import GpusimError
from gpusim.plan.graph import OpGraph
from gpusim.plan.tasks import LaunchMode
from gpusim.policies.registry import POLICIES
from gpusim.report.breakdown import Breakdown, breakdown
from gpusim.report.results import Results, read_all_results
from gpusim.resources import resource_dir
from gpusim.search import whatif
from gpusim.search.searches import SEARCH
from gpusim.search.simulation import Simulated, simulate
from gpusim.units import counted
from gpusim_dashboard import kept
from gpusim_dashboard.cache import cached
from gpusim_dashboard.choice import Choice

#: As the commands under pages call a downloaded schedule.
SCHEDULE_FILE = "best.json"
#: The policy for a step that a searched schedule is not for.
STAND_IN = DEFAULT_POLICY
Sensitivities = tuple[tuple[str, float, float, float], ...]


def step_of(choice: Choice) -> gpusim.Step:
    """The step, whose graph is built once."""
    return _step(choice.content, choice.hardware.name, choice)


@cached
def _step(content: str, hardware: str, _choice: Choice) -> gpusim.Step:
    return gpusim.load(_choice.trace, _choice.hardware)


def graph_of(choice: Choice) -> OpGraph:
    """The op graph. Raises `TraceError` where a kernel breaks a limit of the GPU."""
    return step_of(choice).graph


def breakdown_of(choice: Choice) -> Breakdown:
    """Where the kernel time goes."""
    return _breakdown(choice.content, choice.hardware.name, graph_of(choice))


@cached
def _breakdown(content: str, hardware: str, _graph: OpGraph) -> Breakdown:
    return breakdown(_graph)


def explored_of(choice: Choice) -> gpusim.Explored:
    """The newest exploration of this session for this trace, hardware and streams; else a short one."""
    mine = kept.own(choice)
    return quick_of(choice) if mine is None else mine


def quick_of(choice: Choice) -> gpusim.Explored:
    """The short exploration."""
    return _explored(choice.content, choice.hardware.name, choice.streams, choice)


@cached
def _explored(content: str, hardware: str, streams: int, _choice: Choice) -> gpusim.Explored:
    before = kept.load(_choice, *kept.QUICK)
    found = kept.restore(before, graph_of(_choice)) if before is not None else None
    if found is None:
        found = gpusim.explore(
            step_of(_choice), streams=streams, budget_s=QUICK_BUDGET_S, evaluations=QUICK_EVALUATIONS
        )
        kept.save(_choice, found, breakdown_of(_choice), *kept.QUICK)
    return found


@dataclass(frozen=True)
class Shown:
    """The schedule that pages of one schedule show."""

    policy: str
    """A policy's name, or that of a search."""
    streams: int
    """What the policy was given."""
    schedule: gpusim.Schedule
    recommended: bool

    @property
    def searched(self) -> bool:
        """Whether it is no policy's, hence only good for its own step."""
        return self.policy not in POLICIES

    @property
    def used(self) -> int:
        """Streams in use."""
        return self.schedule.stream_count

    @property
    def words(self) -> list[str]:
        """Options of `gpusim simulate` for it; a searched one is in the file that the Explore page offers."""
        if self.searched:
            return ["--schedule", SCHEDULE_FILE]
        return ["--policy", self.policy, "--streams", str(self.streams)]

    def fixed_on(self, graph: OpGraph) -> tuple[OpGraph, gpusim.Schedule | None]:
        """For what-if questions: the graph with the kernels it runs, and the schedule itself where it is no policy's.

        Kernels chosen from variants count as captured there, so that a change applies to them.
        """
        if not self.searched:
            return graph, None
        return graph.choosing(self.schedule.variants), replace(self.schedule, variants=())

    @property
    def label(self) -> str:
        """Its name on pages."""
        return f"{self.policy}, {counted(self.used, 'stream')}{' (recommended)' if self.recommended else ''}"


def shown_of(choice: Choice) -> Shown:
    """The schedule chosen: a policy's, the best searched one, or the recommended one."""
    if choice.policy in (RECOMMENDED, SEARCH):
        explored = explored_of(choice)
        row = explored.best if choice.policy == RECOMMENDED else explored.best_of(SEARCH)
        return Shown(row.policy, row.streams, row.schedule, choice.policy == RECOMMENDED)
    schedule = _schedule(choice.content, choice.hardware.name, choice.policy, choice.streams, step_of(choice))
    return Shown(choice.policy, choice.streams, schedule, False)


@cached
def _schedule(content: str, hardware: str, policy: str, streams: int, _step: gpusim.Step) -> gpusim.Schedule:
    return resolve_schedule(_step, policy, streams)


def sequential_of(choice: Choice) -> gpusim.Timeline:
    """The sequential graph, with all that the reference engine records."""
    return timeline_of(choice, resolve_schedule(step_of(choice), "sequential"))


def timeline_of(choice: Choice, schedule: gpusim.Schedule, mode: LaunchMode = "graph") -> gpusim.Timeline:
    """A timeline with all that the reference engine records."""
    return _timeline(choice.content, choice.hardware.name, schedule, mode, step_of(choice))


@cached
def _timeline(
    content: str, hardware: str, schedule: gpusim.Schedule, mode: LaunchMode, _step: gpusim.Step
) -> gpusim.Timeline:
    return gpusim.simulate(_step, schedule, launch=mode, engine="reference").timeline


def baseline_of(choice: Choice, mode: LaunchMode) -> Simulated:
    """The what-if page's baseline: `gpusim simulate`."""
    shown = shown_of(choice)
    graph, fixed = shown.fixed_on(graph_of(choice))
    key = (choice.content, choice.hardware.name, shown.policy, shown.streams, mode)
    return _baseline(*key, hash(fixed), fixed, graph)


@cached
def _baseline(
    content: str,
    hardware: str,
    policy: str,
    streams: int,
    mode: LaunchMode,
    fixed: int,
    _fixed: gpusim.Schedule | None,
    _graph: OpGraph,
) -> Simulated:
    return simulate(_graph, _fixed or whatif.policy_schedule(_graph, policy, streams), mode)


@dataclass(frozen=True)
class Question:
    """What the what-if page's controls say; `op` is an index of the trace's ops."""

    trace: str
    gpu: str
    mode: LaunchMode
    streams: int
    sms: int
    bandwidth: float
    launch_cost: float
    queues: int
    op: int
    speed: float

    @property
    def change(self) -> whatif.Change:
        """As the library wants it."""
        return whatif.Change(self.sms, self.bandwidth, self.launch_cost, 1.0, self.queues, {self.op: self.speed})


def answer_of(choice: Choice, question: Question, graph: OpGraph) -> Simulated:
    """The changed step; `graph` is that of the question's trace and GPU."""
    shown = shown_of(choice)
    # A searched schedule belongs to one step and is no rule that would give another: elsewhere a policy stands in.
    own = shown.searched and question.trace == choice.name
    policy = STAND_IN if shown.searched and not own else shown.policy
    graph, fixed = shown.fixed_on(graph) if own else (graph, None)
    return _answer(choice.content, policy, repr(question), hash(fixed), fixed, question, graph)


@cached
def _answer(
    content: str,
    policy: str,
    asked: str,
    fixed: int,
    _fixed: gpusim.Schedule | None,
    _question: Question,
    _graph: OpGraph,
) -> Simulated:
    changed = whatif.changed_graph(_graph, _question.change)
    schedule = _fixed or whatif.policy_schedule(changed, policy, _question.streams)
    return simulate(changed, schedule, _question.mode)


def sensitivities_of(choice: Choice, question: Question, base: Simulated) -> Sensitivities:
    """The tornado's rows for an answer."""
    return _sensitivities(choice.content, base.policy, repr(question), hash(base.schedule), base)


@cached
def _sensitivities(content: str, policy: str, asked: str, schedule: int, _base: Simulated) -> Sensitivities:
    return whatif.sensitivities(_base)


@cached
def other_graph(trace: str, content: str, gpu: str, _trace: gpusim.Trace, _hardware: gpusim.HardwareModel) -> OpGraph:
    """The op graph of another trace or GPU than the chosen one."""
    return gpusim.load(_trace, _hardware).graph


def limits_of(choice: Choice) -> gpusim.Limits:
    """The limits report."""
    return _limits(choice.content, choice.hardware.name, choice.streams, choice)


@cached
def _limits(content: str, hardware: str, streams: int, _choice: Choice) -> gpusim.Limits:
    return gpusim.limits(step_of(_choice), streams=streams)


@cached
def results_files() -> dict[str, Results]:
    """File name -> results of every replay that ships with gpusim; empty where none do."""
    try:
        folder = resource_dir("validate/results")
    except GpusimError:
        return {}
    return read_all_results(folder)
