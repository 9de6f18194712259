"""A step of the user's own: its state, its recording, and the restoration of everything it changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from gpusim.errors import CaptureError
from gpusim.formats.trace import Phase, Role
from gpusim.gpu.capture import optimizers as optim
from gpusim.gpu.capture.calls import Call, JointGraph, OwnResults, State, Value
from gpusim.gpu.capture.joint_graph import layer_names
from gpusim.gpu.capture.layers import Layers
from gpusim.gpu.capture.listen import Listener
from gpusim.gpu.capture.users_errors import users_code
from gpusim.gpu.replay.tensors import equal_elements, restore_elements

Phases = Sequence[tuple[Phase | None, Callable[[Any], Any]]]
"""The phases of a step in order; each receives the result of the one before. The last returns the outputs.

A single phase under None is a whole step that was not split into phases.
"""

#: Types of attributes and options that are compared and restored, such as `training` and a model's own counters.
PLAIN_VALUES: Final = (bool, int, float, str, type(None))


@dataclass
class UserStep:
    """A step as the user's functions, with the modules, optimizers and named tensors that it uses."""

    network: str
    phases: Phases
    device: torch.device
    modules: Mapping[str, torch.nn.Module] = field(default_factory=dict)
    optimizers: Sequence[Optimizer] = ()
    named: Mapping[str, tuple[Role, torch.Tensor]] = field(default_factory=dict)
    """Inputs and targets by name."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """What the user's code receives, lists and dicts too: positional arguments as `arguments`, others by name."""

    @property
    def optimizer_name(self) -> str | None:
        return optim.name_of(self.optimizers)

    def run(self) -> Any:
        """Run one step and return its outputs."""
        value: Any = None
        for _, phase in self.phases:
            value = phase(value)
        return value

    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """Parameters by name; those of optimizers without a module are `parameter.0` and so on."""
        parameters = {
            ".".join(part for part in (prefix, name) if part): parameter
            for prefix, module in self.modules.items()
            for name, parameter in module.named_parameters()
        }
        known = {id(parameter) for parameter in parameters.values()}
        groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        others = {id(p): p for group in groups for p in group["params"] if id(p) not in known}
        return parameters | {f"parameter.{place}": parameter for place, parameter in enumerate(others.values())}

    def states(self) -> list[State]:
        """Return every tensor that the step may read at its start, in a fixed order."""
        parameters = self.parameters()
        names = {id(parameter): name for name, parameter in parameters.items()}
        states = [State(name, "parameter", parameter) for name, parameter in parameters.items()]
        for prefix, module in self.modules.items():
            buffers = dict(module.named_buffers())
            states += [State(".".join(filter(None, (prefix, n))), "buffer", b) for n, b in buffers.items()]
        states += [State(n, "optimizer_state", t) for n, t in optim.named_states(self.optimizers, names)]
        states += [State(f"grad.{n}", "gradient", p.grad) for n, p in parameters.items() if p.grad is not None]
        states += [State(name, role, tensor) for name, (role, tensor) in self.named.items()]
        host = {id(tensor) for tensor in optim.counted_by_host(self.optimizers)}
        once = {id(state.tensor): state for state in reversed(states)}
        return [s for s in states if once[id(s.tensor)] is s and id(s.tensor) not in host and self._is_here(s.tensor)]

    def _is_here(self, tensor: torch.Tensor) -> bool:
        return type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.device.type == self.device.type


class Untouched:
    """Restorer of the state that steps change: tensors, gradients, optimizers, modes, random numbers."""

    def __init__(self, step: UserStep) -> None:
        self.step = step
        self._tensors: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def keep(self, live: Mapping[str, torch.Tensor], before: Mapping[str, State], copy: bool) -> None:
        """Save tensors as they were before the step that first touched them; `copy`: later steps would change the saved
        ones.
        """
        for node, tensor in live.items():
            if id(tensor) not in self._tensors:
                state = before[node].tensor
                self._tensors[id(tensor)] = (tensor, state.clone() if copy else state)

    @contextmanager
    def around(self) -> Iterator[Untouched]:
        parameters = list(self.step.parameters().values())
        gradients = [parameter.grad for parameter in parameters]
        modules = [m for module in self.step.modules.values() for m in module.modules()]
        plain = [(m, {k: v for k, v in vars(m).items() if isinstance(v, PLAIN_VALUES)}) for m in modules]
        rng = rng_state(self.step.device)
        try:
            with optim.counting_on(self.step.device, self.step.optimizers):
                yield self
        finally:
            with torch.no_grad():
                for tensor, copy in self._tensors.values():
                    restore_elements(tensor, copy)
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient
            for module, values in plain:
                vars(module).update(values)
            set_rng_state(rng)


def rng_state(device: torch.device) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the states of the default generators of the CPU and of the step's GPU."""
    return torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None


def set_rng_state(state: tuple[torch.Tensor, torch.Tensor | None]) -> None:
    """Restore the states from `rng_state`."""
    torch.set_rng_state(state[0])
    if state[1] is not None:
        torch.cuda.set_rng_state(state[1])


def record_step(step: UserStep, untouched: Untouched, seed: int) -> JointGraph:
    """Record the second of three steps: the first makes the optimizer's states, the third shows which values change.

    Raises `CaptureError`, with the line of the user's code, for a step that a trace cannot hold.
    """
    given = accumulated(step)
    _hear(step, untouched, strict=False)
    give_back(given)
    torch.manual_seed(seed)
    graph = _hear(step, untouched)
    give_back(given)
    again = _hear(step, untouched)
    return replace(graph, fixed=(*_changes(graph.calls, again.calls), *_other_constants(graph, again)))


def accumulated(step: UserStep) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return parameters with their gradients of now."""
    return [(parameter, parameter.grad) for parameter in step.parameters().values() if parameter.grad is not None]


def give_back(gradients: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Put back gradients that a run has removed: one that adds to them before does so each time."""
    for parameter, gradient in gradients:
        if parameter.grad is None:
            parameter.grad = gradient


def _hear(step: UserStep, untouched: Untouched, strict: bool = True) -> JointGraph:
    """Run one step and record it."""
    parameters = step.parameters()
    owners = {id(parameter): name.rpartition(".")[0] for name, parameter in parameters.items()}
    layers = Layers(layer_names(dict(step.modules)), owners)
    host = optim.counted_by_host(step.optimizers)
    listener = Listener(step.device, step.states(), layers=layers, host=host, strict=strict)
    rng = rng_state(step.device)
    try:
        with users_code(f"the step of '{step.network}' fails"):
            result = listener.listen(step.run)
    finally:
        untouched.keep(listener.live, listener.inputs, copy=strict)
    returned = [t for t in pytree.tree_leaves(result) if isinstance(t, torch.Tensor)]
    outputs = _of_step(listener, returned)
    named = {name: p.grad for name, p in parameters.items() if p.grad is not None}
    gradients = _of_step(listener, list(named.values()))
    graph = listener.graph(
        [value for value, _ in outputs],
        [value for value, _ in gradients],
        returned=[listener.value_of(tensor) for tensor in returned],
        gradient_names=[name for name, gradient in named.items() if listener.value_of(gradient) is not None],
    )
    if not strict:
        return graph
    own = OwnResults(
        outputs=[tensor.detach().clone() for _, tensor in outputs],
        gradients=[tensor.detach().clone() for _, tensor in gradients],
        states={
            listener.inputs[node].name: tensor.detach().clone()
            for node, tensor in listener.live.items()
            if tensor.device.type == step.device.type and not equal_elements(tensor, listener.inputs[node].tensor)
        },
        rng=rng,
    )
    return replace(graph, own=own)


def _of_step(listener: Listener, tensors: Sequence[torch.Tensor]) -> list[tuple[Value, torch.Tensor]]:
    """Return the tensors in the graph, each with its graph value."""
    return [(value, tensor) for tensor in tensors if (value := listener.value_of(tensor)) is not None]


def _changes(calls: Sequence[Call], again: Sequence[Call]) -> list[str]:
    """Describe numbers that differ in the next step. Raises `CaptureError` where the calls themselves differ."""
    changes: dict[str, None] = {}
    for one, other in zip(calls, again, strict=False):
        shape_one, shape_other = _shape(one), _shape(other)
        if shape_one != shape_other:
            raise CaptureError(
                f"{other.at or one.at}the step is not the same each time: {one.function} in one step, "
                f"{other.function} or other arguments in the next"
            )
        if repr((one.args, one.kwargs)) != repr((other.args, other.kwargs)):
            changes[f"{one.at}numbers of {one.function}"] = None
    if len(calls) != len(again):
        longer = calls if len(calls) > len(again) else again
        extra = longer[min(len(calls), len(again))]
        raise CaptureError(
            f"{extra.at}the step is not the same each time: it made {len(calls)} calls, then {len(again)}"
        )
    return list(changes)


def _other_constants(graph: JointGraph, again: JointGraph) -> list[str]:
    """Describe constants of the user's code that differ in the next step."""
    pairs = zip(graph.inputs.items(), again.inputs.items(), strict=False)
    constants = [(n, a, m, b) for (n, a), (m, b) in pairs if a.role == b.role == "constant"]
    changed = [(n, a, m) for n, a, m, b in constants if not equal_elements(a.tensor, b.tensor)]
    return [
        f"elements of a tensor of shape {list(state.tensor.shape)} that is no buffer of a module; register it as one"
        if graph.live[name] is again.live[other]
        else f"the elements of '{state.name}', made by the host"
        for name, state, other in changed
    ]


def _shape(call: Call) -> Any:
    """Return a key of a call that ignores floating-point numbers."""
    leaves, spec = pytree.tree_flatten((call.args, call.kwargs))
    return call.function, spec, [float if isinstance(leaf, float) else leaf for leaf in leaves]
