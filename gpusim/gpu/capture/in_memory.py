"""Capture from Python: a model in memory with its own loss and optimizer, or a step function.

The step runs on the user's own objects. Everything it changes is restored: parameters, buffers, gradients, optimizer
states, random number states.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch.utils import _pytree as pytree

from gpusim.defaults import DEFAULT_SEED
from gpusim.errors import CaptureError
from gpusim.formats.trace import Dtype, Frontend, Mode, Role, Trace
from gpusim.gpu.capture import optimizers as optim
from gpusim.gpu.capture.capture import capture_recorded
from gpusim.gpu.capture.options import CaptureOptions, as_recorded, check_frontend
from gpusim.gpu.capture.user_step import Phases, Untouched, UserStep, record_step
from gpusim.gpu.device import explain_out_of_memory, is_another_gpu, precision, require_gpu, without_autocast
from gpusim.gpu.reach.search import models_behind

Say = Callable[[str], None]


@explain_out_of_memory
def capture(
    model: torch.nn.Module,
    inputs: Any,
    *,
    targets: Any = (),
    loss: Callable[..., torch.Tensor] | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    kwargs: Mapping[str, Any] | None = None,
    dtype: Dtype | None = None,
    autocast: torch.dtype | bool | None = None,
    clip_grad_norm: float | None = None,
    clip_grad_value: float | None = None,
    frontend: Frontend = "aten",
    variants: bool = False,
    name: str | None = None,
    seed: int = DEFAULT_SEED,
    say: Say = lambda _: None,
) -> Trace:
    """Capture one step of a model on the current GPU: inference, or training where `loss` or `optimizer` is given.

    `inputs` and `targets` are the arguments of `model(*inputs, **kwargs)` and `loss(output, *targets)`: tensors in any
    structure; anything but a tuple counts as a tuple of one. Without `loss`, the output must be the loss. `dtype` sets
    the precision of products: `fp32`, `tf32` (the default for 32-bit parameters), or `bf16`. `autocast` is
    `torch.bfloat16` or True. `frontend` is `aten` or `inductor`. Raises `CaptureError`, with the line of the user's
    code, for a step that a trace cannot hold, and `GpuError` without a GPU.
    """
    device = require_gpu()
    step = model_step(
        model,
        inputs,
        device,
        targets=targets,
        loss=loss,
        optimizer=optimizer,
        kwargs=kwargs,
        autocast=autocast,
        clip_grad_norm=clip_grad_norm,
        clip_grad_value=clip_grad_value,
        name=name,
    )
    mode: Mode = "infer" if loss is None and optimizer is None else "train"
    options = options_of(step, _spec(type(model)), mode, dtype, bool(autocast), seed, variants, frontend)
    return _capture(step, options, say, True)


@explain_out_of_memory
def capture_step(
    function: Callable[..., Any],
    inputs: Any = (),
    *,
    kwargs: Mapping[str, Any] | None = None,
    dtype: Dtype | None = None,
    mode: Mode | None = None,
    frontend: Frontend = "aten",
    variants: bool = False,
    name: str | None = None,
    seed: int = DEFAULT_SEED,
    say: Say = lambda _: None,
) -> Trace:
    """Capture one call of `function(*inputs, **kwargs)` on the current GPU: a step with its own forward, backward,
    optimizer.

    The function is called several times and must make the same calls each time. Modules and optimizers are found as
    `gpusim.gpu.reach` says; their changes are undone. Arguments and errors are those of `capture`; `mode` defaults to
    `train` where the function reaches an optimizer or computes gradients.
    """
    step = function_step(function, inputs, require_gpu(), kwargs=kwargs, name=name)
    least: Mode = "train" if step.optimizers else "infer"
    options = options_of(step, _spec(function), mode or least, dtype, False, seed, variants, frontend)
    return _capture(step, options, say, mode is not None)


def _capture(step: UserStep, options: CaptureOptions, say: Say, mode_is_given: bool) -> Trace:
    """Record, check and measure a step, for `capture` and `capture_step`."""
    check_frontend(options)
    plain = without_autocast(step.device)  # recorded calls are below it
    with plain, precision(options.dtype), Untouched(step).around() as untouched:
        say("recording its operators")
        graph = record_step(step, untouched, options.seed)
        if not mode_is_given:
            options = as_recorded(options, graph.calls)
        return capture_recorded(step, graph, options, step.device, say).trace


def model_step(
    model: torch.nn.Module,
    inputs: Any,
    device: torch.device,
    *,
    targets: Any = (),
    loss: Callable[..., torch.Tensor] | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    kwargs: Mapping[str, Any] | None = None,
    autocast: torch.dtype | bool | None = None,
    clip_grad_norm: float | None = None,
    clip_grad_value: float | None = None,
    name: str | None = None,
) -> UserStep:
    """Return one step of a model as functions; arguments as in `capture`. Raises `CaptureError`."""
    if not isinstance(model, torch.nn.Module):
        raise CaptureError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
    given, wanted = (value if isinstance(value, tuple) else (value,) for value in (inputs, targets))
    named = {**_named("input", (given, dict(kwargs or {})), "input"), **_named("target", wanted, "target")}
    modules = {"": model} | ({"loss": loss} if isinstance(loss, torch.nn.Module) else {})
    check_devices(modules, named, device)
    if optimizer is not None:
        optim.refuse(optimizer)
    phases = model_phases(
        model,
        given,
        device,
        targets=wanted,
        loss=loss,
        optimizer=optimizer,
        kwargs=kwargs,
        autocast=autocast,
        clip_grad_norm=clip_grad_norm,
        clip_grad_value=clip_grad_value,
    )
    optimizers = [] if optimizer is None else models_behind({"optimizer": optimizer}).optimizers
    optimizers += [each for each in in_hooks(modules.values()) if each not in optimizers]
    arguments = {"arguments": (*given, *wanted), **(kwargs or {})}
    return UserStep(name or _short(type(model).__name__), phases, device, modules, optimizers, named, arguments)


def model_phases(
    model: torch.nn.Module,
    inputs: tuple[Any, ...],
    device: torch.device,
    *,
    targets: tuple[Any, ...] = (),
    loss: Callable[..., torch.Tensor] | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    kwargs: Mapping[str, Any] | None = None,
    autocast: torch.dtype | bool | None = None,
    clip_grad_norm: float | None = None,
    clip_grad_value: float | None = None,
) -> Phases:
    """Return one step of a model as functions, also of one that cannot be captured; arguments as in `capture`."""
    cast = _autocast_dtype(autocast)
    of_loss = loss.parameters() if isinstance(loss, torch.nn.Module) else ()
    parameters = [*model.parameters(), *of_loss]
    if optimizer is not None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]

    trained = loss is not None or optimizer is not None

    def forward(_: Any) -> Any:
        if optimizer is not None:
            optimizer.zero_grad(set_to_none=True)
        elif trained:
            for parameter in parameters:
                parameter.grad = None
        with nullcontext() if cast is None else torch.autocast(device.type, dtype=cast):
            output = model(*inputs, **(kwargs or {}))
            return output if loss is None else loss(output, *targets)

    def infer(_: Any) -> Any:
        with torch.no_grad():
            return forward(None)

    def backward(value: Any) -> Any:
        _check_loss(value, given_loss=loss is not None)
        value.backward()
        return value.detach()

    def update(value: Any) -> Any:
        if clip_grad_value is not None:
            torch.nn.utils.clip_grad_value_(parameters, clip_grad_value)
        if clip_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(parameters, clip_grad_norm)
        if optimizer is not None:
            optimizer.step()
        return value

    if trained:
        return [("forward", forward), ("backward", backward), ("optimizer", update)]
    return [("forward", infer)]


def function_step(
    function: Callable[..., Any],
    inputs: Any,
    device: torch.device,
    *,
    kwargs: Mapping[str, Any] | None = None,
    name: str | None = None,
) -> UserStep:
    """Return a user's step function as a step. Raises `CaptureError` for an object that is not callable."""
    if not callable(function):
        raise CaptureError(f"step function: expected a callable, got {type(function).__name__}")
    given = inputs if isinstance(inputs, tuple) else (inputs,)
    named = _named("input", (given, dict(kwargs or {})), "input")
    arguments = {"arguments": given, **(kwargs or {})}
    found = models_behind({"": function, **arguments})
    check_devices(found.near, named, device)
    modules = found.near | {
        f"reached.{number}": module for number, module in enumerate(found.further) if _is_on(module, device)
    }
    modules = {"": next(iter(modules.values()))} if len(modules) == 1 else modules
    optimizers = found.optimizers
    optimizers += [each for each in in_hooks(modules.values()) if each not in optimizers]
    for optimizer in optimizers:
        optim.refuse(optimizer)
    phases: Phases = [(None, lambda _: function(*given, **(kwargs or {})))]
    called = getattr(function, "__name__", type(function).__name__)
    return UserStep(name or _short(called), phases, device, modules, optimizers, named, arguments)


def options_of(
    step: UserStep,
    spec: str,
    mode: Mode,
    dtype: Dtype | None,
    autocast: bool,
    seed: int,
    variants: bool,
    frontend: Frontend = "aten",
) -> CaptureOptions:
    """Return the options of a capture from Python, in the form that the command line gives."""
    kinds = {parameter.dtype for parameter in step.parameters().values()}
    kinds |= {tensor.dtype for _, tensor in step.named.values() if tensor.is_floating_point()}
    odd = kinds - {torch.float32, torch.bfloat16}
    if odd:
        listed = ", ".join(sorted(str(kind) for kind in odd))
        raise CaptureError(f"parameters or inputs of {listed}: a step must compute in float32 or bfloat16")
    if dtype is None:
        dtype = "bf16" if autocast or torch.bfloat16 in kinds else "tf32"
    if dtype not in ("fp32", "tf32", "bf16"):
        raise CaptureError(f"dtype '{dtype}': one of fp32, tf32, bf16")
    images = [t for _, t in step.named.values() if t.dim() == 4]
    last = any(t.is_contiguous(memory_format=torch.channels_last) and not t.is_contiguous() for t in images)
    sizes = [t.shape[0] for role, t in step.named.values() if role == "input" and t.dim()]
    return CaptureOptions(
        spec=spec,
        mode=mode,
        batch=max(1, sizes[0]) if sizes else 1,
        dtype=dtype,
        memory_format="channels_last" if last else "contiguous",
        frontend=frontend,
        seed=seed,
        variants=variants,
        command=f"gpusim.capture of {spec}",
    )


def in_hooks(modules: Iterable[torch.nn.Module]) -> list[torch.optim.Optimizer]:
    """Return the optimizers that hooks of parameters reach: those that update each once it has its gradient."""
    parameters = dict.fromkeys(parameter for module in modules for parameter in module.parameters())
    hooks = [getattr(parameter, "_post_accumulate_grad_hooks", None) or {} for parameter in parameters]
    functions = [hook for each in hooks for hook in each.values()]
    return models_behind({f"hook.{number}": function for number, function in enumerate(functions)}).optimizers


def check_devices(
    modules: Mapping[str, torch.nn.Module], named: Mapping[str, tuple[Role, torch.Tensor]], device: torch.device
) -> None:
    """Raise `CaptureError` for a parameter, buffer or example input that is not on the step's device, and for
    TorchScript, whose code cannot be watched.
    """
    for each in modules.values():
        if any(isinstance(module, torch.jit.ScriptModule) for module in each.modules()):
            raise CaptureError("the model is TorchScript, or has such a part; capture the module that it was made from")
    tensors = {name: tensor for name, (_, tensor) in named.items()}
    for module in modules.values():
        tensors |= dict(module.named_parameters()) | dict(module.named_buffers())
    for name, tensor in tensors.items():
        if torch.nn.parameter.is_lazy(tensor):
            raise CaptureError(f"'{name}' has no shape yet: call the lazy module once, on an example, first")
        if tensor.device.type != device.type:
            raise CaptureError(f"'{name}' is on {tensor.device}; move the model and its inputs to {device} first")
        if is_another_gpu(tensor.device, device):
            number = tensor.device.index
            raise CaptureError(f"'{name}' is on {tensor.device}, not on {device}: call torch.cuda.set_device({number})")


def _is_on(module: torch.nn.Module, device: torch.device) -> bool:
    """Whether all of a module is on this device, and can be recorded."""
    try:
        check_devices({"": module}, {}, device)
    except CaptureError:
        return False
    return True


def _named(prefix: str, values: Any, role: Role) -> dict[str, tuple[Role, torch.Tensor]]:
    """Name the tensors in a structure: input.0, input.1 ..."""
    tensors = [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, torch.Tensor)]
    return {f"{prefix}.{place}": (role, tensor) for place, tensor in enumerate(tensors)}


def _check_loss(value: Any, given_loss: bool) -> None:
    if isinstance(value, torch.Tensor) and value.numel() == 1 and value.requires_grad:
        return
    returned = f"a tensor of shape {list(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        returned = "a number that depends on no parameter"
    whose = "the loss function" if given_loss else "the model, without loss=,"
    raise CaptureError(f"{whose} returns {returned}; expected one differentiable number")


def _autocast_dtype(autocast: torch.dtype | bool | None) -> torch.dtype | None:
    if autocast in (None, False):
        return None
    if autocast is True or autocast == torch.bfloat16:
        return torch.bfloat16
    raise CaptureError(f"autocast={autocast}: only torch.bfloat16, which needs no loss scaling")


def _spec(of: Any) -> str:
    """Return the qualified name of a class or function, as a trace's `spec`."""
    name = getattr(of, "__qualname__", type(of).__qualname__)
    return f"{getattr(of, '__module__', type(of).__module__)}.{name}"


def _short(name: str) -> str:
    """Turn a name into lower case with underscores, as in traces."""
    return re.sub(r"\W+", "_", name).strip("_").lower() or "step"
