"""Recipe file (TOML): a list of cases to capture, explore and replay on a GPU."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from gpusim.defaults import DEFAULT_SEED, DEFAULT_STREAMS, MAX_BUDGET_S, SEARCH
from gpusim.formats.results import Ablation, Baseline, RecipeName
from gpusim.formats.schedule import StreamCount
from gpusim.formats.trace import Dtype, Frontend, MemoryFormat, Mode, named_trace
from gpusim.io.file_limits import MAX_RECIPE_REPEATS
from gpusim.io.files import Count, Document, Positive

#: Schedules, pairs and repetitions of a case.
Repeats = Annotated[int, Meta(ge=0, le=MAX_RECIPE_REPEATS)]
PositiveRepeats = Annotated[int, Meta(ge=1, le=MAX_RECIPE_REPEATS)]


class Case(Document, frozen=True, kw_only=True):
    """One step: either `spec` with `mode` and `batch`, to capture, or `trace`, to use as it is."""

    spec: str | None = None
    """Model, as for `gpusim capture`."""
    mode: Mode | None = None
    batch: Positive | None = None
    dtype: Dtype = "tf32"
    memory_format: MemoryFormat = "contiguous"
    frontend: Frontend = "aten"
    variants: bool = False
    """As for `gpusim capture`: measure other algorithms and let the search use them. A given trace gets variants for
    operators that have none.
    """
    trace: str | None = None
    """Trace file, or name of a bundled trace."""
    fitted: bool = False
    """Whether a constant of the hardware model was fitted on this network."""
    against: tuple[Baseline, ...] = ()
    """Further baselines of this case; only where the recipe has some."""

    @property
    def trace_name(self) -> str:
        """Name of the trace that a capture of this case makes. Only for a case with `spec`."""
        assert self.spec is not None
        assert self.mode is not None
        assert self.batch is not None
        network = self.spec.rpartition(":")[2]
        return named_trace(network, self.mode, self.batch, self.dtype, self.frontend)


class Recipe(Document, frozen=True, kw_only=True):
    """Cases, and the work for each."""

    name: RecipeName
    """Prefix of the results files' names: letters, digits, `_` and `-`."""
    case: tuple[Case, ...]
    against: tuple[Baseline, ...] = ()
    """Baselines: each case is optimized (`gpusim.optimize`) and timed with these, and no schedules are replayed."""
    ablations: tuple[Ablation, ...] = ()
    """Freedoms to take away: each case is optimized in full and without each of these, and all are timed in turns."""
    policies: tuple[str, ...] = (SEARCH,)
    """Policies to replay in addition to the sequential one, at the stream count predicted best; or any of
    `gpusim.validation.recipe.SEARCHES`.
    """
    counts: tuple[StreamCount, ...] = ()
    """Stream counts to replay each policy at, instead of the one predicted best."""
    memory_policies: tuple[str, ...] = ()
    """Memory policies to replay instead of schedules, in addition to the one that keeps all; only for runs in
    stages.
    """
    memory_budgets: tuple[Annotated[float, Meta(gt=0, le=1)], ...] = ()
    """Budgets for policies that take one, as shares of the peak of the step that keeps all."""
    memory_matched: bool = False
    """Whether our own policy is replayed, too, with the peak of each of these as its budget."""
    random: Repeats = 0
    """Number of random legal schedules replayed per case, on 2 to 8 streams."""
    pairs: Repeats = 0
    """Number of random pairs and triples of concurrent kernels per case."""
    measure: Repeats = 0
    """Number of the schedules predicted best to try on the GPU; the fastest of them is the searched one."""
    trials: Repeats = 0
    """Number of schedules per policy, and of the search, to try on the GPU, both with captured and with the fastest
    kernels; the fastest schedule of each is replayed. Only for runs in stages.
    """
    neighbours: Repeats = 0
    """Number of schedules predicted within 5 % of the best to replay, in place of policies; only for runs in stages."""
    processes: PositiveRepeats = 1
    """Processes that replay each schedule; only for runs in stages."""
    recordings: PositiveRepeats = 7
    """Recordings per schedule; the one of median time is timed (of an even number, the faster of the middle two)."""
    rounds: Repeats = 0
    """Rounds in which the schedules are timed in turns; 0 for as many as `gpusim replay` makes."""
    partitions: str | None = None
    """SM splits to search schedules on, as for `gpusim explore --partitions`."""
    streams: StreamCount = DEFAULT_STREAMS
    budget_s: Annotated[float, Meta(gt=0, le=MAX_BUDGET_S)] = 12.0
    seed: Count = DEFAULT_SEED
    traces: str | None = None
    """Folder that keeps the captured traces, relative to the working directory; none are kept without it."""

    @property
    def optimizes(self) -> bool:
        """Whether cases are optimized, in place of a replay of schedules."""
        return bool(self.against or self.ablations)
