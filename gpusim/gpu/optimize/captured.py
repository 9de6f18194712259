"""A user's step as ops that can be run repeatedly on the user's own tensors: the part that all schedules share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final

import torch
from torch.utils import _pytree as pytree

from gpusim.errors import CaptureError
from gpusim.formats.trace import Frontend, Trace
from gpusim.gpu.capture.calls import JointGraph
from gpusim.gpu.capture.options import CaptureOptions, as_recorded
from gpusim.gpu.capture.rebuild import rebuild
from gpusim.gpu.capture.record import Recorded
from gpusim.gpu.capture.user_step import Untouched, UserStep, record_step
from gpusim.gpu.inductor.kernels import Compiling, functions_of
from gpusim.gpu.inductor.styles import DEFAULT_STYLE
from gpusim.gpu.optimize.hooks import Hooks
from gpusim.gpu.optimize.lists import with_split_lists
from gpusim.gpu.optimize.optimizers import LearningRates, with_steps
from gpusim.gpu.optimize.reads import Reads
from gpusim.gpu.optimize.slots import Gradients, Places, Presence, States
from gpusim.gpu.optimize.steps import TENSORS

#: Style of a step with ATen's calls in some regions and Inductor's kernels in others.
MIXED: Final = "mixed"
#: Operators that only write what they change.
_ZEROING: Final = ("aten.zero_.default", "aten._foreach_zero_.default")
#: Types that a step may return in addition to tensors: constant, and never a tensor in disguise.
_PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device, torch.Size)


@dataclass
class Captured:
    """A step as ops, bound to the user's tensors. `trace` has no times yet."""

    trace: Trace
    recorded: Recorded
    live: dict[int, torch.Tensor]
    """Tensor id -> the user's own tensor, or the static input, for tensors from before the step."""
    inputs: list[torch.Tensor]
    """Static inputs, into which a call copies its arguments."""
    returned: Returned
    places: Places
    states: States
    gradient_names: tuple[str, ...]
    """Parameters with a gradient, in the order of `recorded.gradients`."""
    gradients: dict[int, torch.Tensor]
    """Tensor id -> the parameter whose gradient it is, for gradients in memory of their own."""
    given: list[tuple[torch.Tensor, torch.Tensor]]
    """Parameters whose gradient the step reads, changes or returns, with the memory of that gradient."""
    presence: Presence
    modes_left: list[tuple[torch.nn.Module, Any]]
    """Modules that the step leaves in another mode, with that mode."""
    reads: Reads
    hooks: Hooks
    options: CaptureOptions
    pristine: dict[int, torch.Tensor]
    """Initial contents of the tensors of `live`, until `drop_copies`."""
    graph: JointGraph | None
    """Recorded calls, for another front end; they hold copies of the user's tensors."""
    style: str = DEFAULT_STYLE
    """Inductor's compile style, or `MIXED`."""
    compiling: Compiling | None = None
    """Its kernels under compilation, if any."""

    @property
    def frontend(self) -> Frontend:
        """Front end of the ops' kernels."""
        return self.trace.model.frontend

    @property
    def label(self) -> str:
        """Origin of the kernels in a few words."""
        if self.style == MIXED:
            return "ATen's and Inductor's kernels, by region"
        return "ATen's kernels" if self.frontend == "aten" else f"Inductor's kernels ({self.style})"

    def drop_copies(self) -> None:
        """Drop the copies of the user's tensors, once nothing runs on trial any more."""
        self.graph = None
        self.pristine.clear()

    @cached_property
    def functions(self) -> list[Callable[..., Any]] | None:
        """Functions of the ops, made once for all runners; None where runners make them."""
        return functions_of(self.trace, self.compiling) if self.frontend == "inductor" else None


@dataclass(frozen=True)
class Returned:
    """Return value of a step: its structure, and for each leaf a tensor's id, a constant tensor, or a value."""

    spec: Any
    leaves: tuple[Any, ...]

    def ids(self) -> list[int]:
        """Ids of the tensors that the step computes."""
        return [leaf.tensor for leaf in self.leaves if isinstance(leaf, Computed)]

    def copied(self, kept: frozenset[int]) -> list[int]:
        """Ids of those among them that a call copies: all but the leaves at the places in `kept`."""
        leaves = enumerate(self.leaves)
        return [leaf.tensor for place, leaf in leaves if isinstance(leaf, Computed) and place not in kept]


@dataclass(frozen=True)
class Computed:
    """A tensor of the step's, by id."""

    tensor: int


def capture_bound(
    step: UserStep,
    rates: LearningRates,
    options: CaptureOptions,
    inputs: Sequence[torch.Tensor],
    roots: Sequence[Any] = (),
) -> Captured:
    """Record a step, check it against itself and bind it to the user's tensors. `inputs` are copied at each call.

    `roots` are objects from which the step can reach other Python objects. Raises `CaptureError` for steps that cannot
    be captured: they read elements, change shapes with data, or differ from call to call.
    """
    watched = _Watched(step)
    modules = list(dict.fromkeys(m for module in step.modules.values() for m in module.modules()))
    modes = _modes(modules)
    with Untouched(step).around() as untouched, rates.in_use():
        graph = record_step(watched.step, untouched, options.seed)
        options = as_recorded(options, graph.calls)
        if graph.fixed:
            raise CaptureError(f"a number that changes from step to step cannot be captured: {graph.fixed[0]}")
        # One launch takes only that many tensors anyway; in parts, early gradients are used early.
        graph = with_split_lists(graph)
        modes_left = [after for before, after in zip(modes, _modes(modules), strict=True) if before != after]
        rebuilt = rebuild(step, graph, options, step.device, own=True)
        left = {id(p) for p in step.parameters().values() if p.grad is not None}
        recorded = rebuilt.recorded
        if not any(op.writes for op in recorded.ops):
            raise CaptureError("the step computes nothing: its operators only view tensors")
        live: dict[int, torch.Tensor] = {}
        for index, name in recorded.named.items():
            tensor, copy = graph.live[name], graph.inputs[name].tensor
            live[index] = tensor.detach() if tensor.device == copy.device else copy
        ids = {index: id(graph.live[name]) for index, name in recorded.named.items()}
        used = {number: _moved(recorded, index) for index, number in ids.items()}
        states = States.of(step, rates, used)
    parameters = step.parameters()
    gradients: dict[int, torch.Tensor] = {}
    given: list[tuple[torch.Tensor, torch.Tensor]] = []
    touched = {recorded.tensors[t].storage for op in recorded.ops for t in (*op.reads, *op.writes)}
    touched |= {recorded.tensors[index].storage for index in recorded.outputs}
    others: list[torch.nn.Parameter] = []
    """Parameters whose gradient is another step's, which may take it away."""
    for name, index in zip(graph.gradient_names, recorded.gradients, strict=True):
        if index in live and recorded.tensors[index].storage not in touched:
            others.append(parameters[name])
        elif index in live:
            given.append((parameters[name], graph.live[recorded.named[index]]))
        else:
            gradients[index] = parameters[name]
    for index, name in recorded.named.items():
        if recorded.tensors[index].role == "gradient" and index not in recorded.gradients:
            owner = next(p for n, p in parameters.items() if f"grad.{n}" == recorded.tensors[index].name)
            given.append((owner, graph.live[name]))
    added = _only_added_to(recorded)
    may_lack = {id(graph.live[n]) for i, n in recorded.named.items() if recorded.tensors[i].storage in added}
    sets_modes = step.phases[0][0] is not None  # a model's step, not a function of the user's
    reads = Reads((*roots, *with_steps(step.optimizers), *Hooks(step).functions()), modules, sets_modes)
    of_optimizers = [p for p in parameters.values() if id(p) in used]
    elsewhere = [graph.live[n] for i, n in recorded.named.items() if recorded.tensors[i].role == "constant"]
    only_returned = watched.untouched(recorded.returned)
    on_host = [tensor for tensor in elsewhere if tensor.device.type != step.device.type]
    may_use = bool(graph.gradient_names or step.optimizers or reads.gradients)
    presence = Presence(
        absent=[p for p in parameters.values() if may_use and p.grad is None and id(p) not in left],
        present=[
            *(p for p, gradient in given if id(gradient) not in may_lack),
            *(others if reads.gradients else ()),  # the code may ask whether it is there
        ],
        cleared=[p for p in parameters.values() if p.grad is not None and id(p) not in left],
    )
    return Captured(
        trace=rebuilt.trace,
        recorded=replace(recorded, initial={}, final={}),  # copies, which take memory
        live=live,
        inputs=list(inputs),
        returned=watched.returned(recorded.returned),
        places=Places([*modules, *reads.hidden], used, may_use, [*of_optimizers, *elsewhere, *only_returned], on_host),
        states=states,
        gradient_names=graph.gradient_names,
        gradients=gradients,
        given=given,
        presence=presence,
        modes_left=modes_left,
        reads=reads,
        hooks=Hooks(step, reads.hidden),
        options=options,
        pristine={index: tensor.clone() for index, tensor in live.items()},
        graph=replace(graph, own=None),
    )


def _only_added_to(recorded: Recorded) -> set[int]:
    """Return the storages to which a backward adds, and whose elements nothing reads before that or before they are
    zeroed: zeros do as well as none.
    """
    first: dict[int, bool] = {}
    added: set[int] = set()
    for op in recorded.ops:
        reads, writes = ({recorded.tensors[index].storage for index in each} for each in (op.reads, op.writes))
        zeroes = op.target in _ZEROING
        added |= writes if op.phase == "backward" and not zeroes else set()
        for storage in reads | writes:
            first.setdefault(storage, storage in reads and storage not in added and not zeroes)
    return {storage for storage in added if not first[storage]}


def _modes(modules: Sequence[torch.nn.Module]) -> list[tuple[torch.nn.Module, Any]]:
    return [(module, vars(module).get("training")) for module in modules]


def _moved(recorded: Recorded, index: int) -> float:
    """Return the change of a count by one step; 0 for another tensor."""
    before, after = recorded.initial[index], recorded.final.get(index)
    return 0.0 if after is None or before.numel() != 1 else (after.double() - before.double()).item()


class _Watched:
    """A step whose results are inspected at each run."""

    def __init__(self, step: UserStep) -> None:
        self._spec: Any = None
        self._leaves: list[Any] = []
        self.step = replace(step, phases=[*step.phases, (None, self._look)])

    def _look(self, value: Any) -> Any:
        leaves, spec = flattened(value)
        for leaf in leaves:
            if not isinstance(leaf, (torch.Tensor, *_PLAIN)):
                raise CaptureError(
                    f"the step returns a {type(leaf).__name__}; tensors, numbers, text, and lists, tuples and dicts of "
                    "them can be given back"
                )
            if isinstance(leaf, torch.Tensor) and type(leaf) not in TENSORS:
                raise CaptureError(f"the step returns a tensor of type {type(leaf).__name__}, not a plain one")
            if isinstance(leaf, torch.Tensor) and type(leaf) is torch.Tensor and vars(leaf):
                raise CaptureError(
                    f"the step returns a tensor with an attribute of its own, '{next(iter(vars(leaf)))}'"
                )
        plain = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        before = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in self._leaves]
        if self._spec is not None and (spec != self._spec or plain != before):
            raise CaptureError("the step returns another structure, or other numbers, each time")
        self._spec, self._leaves = spec, leaves
        return value

    def untouched(self, ids: Sequence[int | None]) -> list[torch.Tensor]:
        """Return the user's tensors that the step returns and does nothing with."""
        tensors = (leaf for leaf in self._leaves if isinstance(leaf, torch.Tensor))
        return [tensor for tensor, index in zip(tensors, ids, strict=True) if index is None]

    def returned(self, ids: Sequence[int | None]) -> Returned:
        """Return the step's return value once its tensors have ids."""
        numbers = iter(ids)
        leaves: list[Any] = []
        for leaf in self._leaves:
            if not isinstance(leaf, torch.Tensor):
                leaves.append(leaf)
                continue
            index = next(numbers)
            leaves.append(leaf.detach() if index is None else Computed(index))
        return Returned(self._spec, tuple(leaves))


def flattened(value: Any) -> tuple[list[Any], Any]:
    """Return the leaves and the structure of what a step returns; a shape is one leaf, of its own type."""
    leaves, spec = pytree.tree_flatten(value, is_leaf=lambda part: isinstance(part, torch.Size))
    return leaves, spec


def gradients_of(captured: Captured, tensors: Sequence[torch.Tensor | None]) -> Gradients:
    """Return the gradients of a run whose results are in `tensors`."""
    left = [(p, tensors[index]) for index, p in captured.gradients.items()]
    return Gradients(captured.given, [(p, t) for p, t in left if t is not None], captured.presence)
