"""One step of a model as a flat list of ATen calls: forward, loss, backward and optimizer in one graph.

`gpusim.gpu.capture.listen` records at the dispatcher, so the calls are those of eager PyTorch, with layer and phase.
`aten.convolution_backward` becomes two independent ops: the gradient of the input and that of the weight.
"""

from __future__ import annotations

import torch
from torch.utils import _pytree as pytree

from gpusim.gpu.capture.calls import JointGraph, State, Value
from gpusim.gpu.capture.layers import Layers
from gpusim.gpu.capture.listen import Listener
from gpusim.gpu.capture.models import ModelStep
from gpusim.gpu.capture.users_errors import users_code
from gpusim.gpu.replay.tensors import copy_sharing

#: SGD with momentum, as torch.optim.SGD(lr, momentum) from the second step on. The rate is small so that thousands of
#: steps on one batch of random data stay finite.
LEARNING_RATE = 1e-4
MOMENTUM = 0.9
#: Parameters per fused update. A launch of torch's multi-tensor kernels takes at most this many pairs
#: (depth_to_max_tensors in ATen/native/cuda/MultiTensorApply.cuh): smaller lists would add launches, larger ones would
#: only delay early gradients.
OPTIMIZER_BUCKET = 64


def joint_graph(step: ModelStep) -> JointGraph:
    """Record one step. Raises `CaptureError` where the step depends on data values or a trace cannot hold it."""
    module = step.module
    parameters = dict(module.named_parameters())
    buffers = dict(module.named_buffers())
    trained = [name for name, p in parameters.items() if p.requires_grad] if step.loss else []
    flat_inputs, input_spec = pytree.tree_flatten(step.inputs)
    held = [*parameters.values(), *buffers.values(), *(t for t in flat_inputs if isinstance(t, torch.Tensor))]
    copies = iter(copy_sharing(dict(enumerate(tensor.detach() for tensor in held))).values())
    states = [State(name, "parameter", next(copies)) for name in parameters]
    states += [State(name, "buffer", next(copies)) for name in buffers]
    states += [State(f"momentum.{n}", "optimizer_state", torch.zeros_like(parameters[n])) for n in trained]
    states += [
        State(f"input.{i}", "input", next(copies)) for i, t in enumerate(flat_inputs) if isinstance(t, torch.Tensor)
    ]
    if step.target is not None:
        states.append(State("target", "target", step.target))
    given = {state.name: state.tensor for state in states}
    inputs = pytree.tree_unflatten([given.get(f"input.{i}", value) for i, value in enumerate(flat_inputs)], input_spec)
    device = next((tensor.device for tensor in given.values()), torch.device("cuda"))
    listener = Listener(device, states, layers=Layers(layer_names({"": module}), {}))

    def run() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        if step.loss is None:
            with torch.no_grad():
                own = {name: given[name] for name in (*parameters, *buffers)}
                output = torch.func.functional_call(module, own, inputs)
            return [t for t in pytree.tree_leaves(output) if isinstance(t, torch.Tensor)], []
        leaves = {name: given[name].detach().requires_grad_(name in trained) for name in parameters}
        output = torch.func.functional_call(module, {**leaves, **{n: given[n] for n in buffers}}, inputs)
        loss = step.loss(output, given.get("target"))
        gradients = torch.autograd.grad(loss, [leaves[name] for name in trained], allow_unused=True)
        with torch.no_grad():
            listener.phase = "optimizer"
            _sgd(
                [
                    (given[n], g, given[f"momentum.{n}"])
                    for n, g in zip(trained, gradients, strict=True)
                    if g is not None
                ]
            )
        return [loss.detach()], [g for g in gradients if g is not None]

    with users_code(f"the step of '{step.network}' cannot be recorded"):
        outputs, gradients = listener.listen(run)
    return listener.graph(_values(listener, outputs), _values(listener, gradients))


def _values(listener: Listener, tensors: list[torch.Tensor]) -> list[Value]:
    return [value for tensor in tensors if (value := listener.value_of(tensor)) is not None]


def layer_names(modules: dict[str, torch.nn.Module]) -> dict[torch.nn.Module, str]:
    """Return module -> path; a module with several names gets the first."""
    names: dict[torch.nn.Module, str] = {}
    for prefix, module in modules.items():
        for path, child in module.named_modules():
            names.setdefault(child, ".".join(part for part in (prefix, path) if part))
    return names


def sgd_step(parameters: list[torch.Tensor], gradients: list[torch.Tensor], momenta: list[torch.Tensor]) -> None:
    """One update of torch.optim.SGD with momentum, on lists, in place."""
    torch._foreach_mul_(momenta, MOMENTUM)
    torch._foreach_add_(momenta, gradients)
    torch._foreach_add_(parameters, momenta, alpha=-LEARNING_RATE)


def _sgd(triples: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]) -> None:
    """Update in buckets, last layers first, since their gradients arrive first."""
    triples = triples[::-1]
    for begin in range(0, len(triples), OPTIMIZER_BUCKET):
        parameters, gradients, momenta = zip(*triples[begin : begin + OPTIMIZER_BUCKET], strict=True)
        sgd_step(list(parameters), list(gradients), list(momenta))
