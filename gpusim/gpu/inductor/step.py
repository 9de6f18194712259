"""A recorded step as Inductor's kernels: the same states, outputs and gradients, with other ops in between."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from gpusim.errors import CaptureError
from gpusim.formats.trace import Role, Source
from gpusim.gpu.capture.calls import JointGraph
from gpusim.gpu.capture.record import Recorded, set_roles
from gpusim.gpu.inductor import styles, versions
from gpusim.gpu.inductor.channels_last import channels_last
from gpusim.gpu.inductor.functional import FunctionalGraph, Traced, functional_graph
from gpusim.gpu.inductor.gemv import products_as_sums
from gpusim.gpu.inductor.places import Places
from gpusim.gpu.inductor.read import Read, read_lines
from gpusim.gpu.inductor.seam import OWN, Lines, compile_graph


def inductor_step(graph: JointGraph, recorded: Recorded, training: bool, style: str = styles.DEFAULT_STYLE) -> Recorded:
    """Compile a recorded step with Inductor. `recorded` is the same step as ATen calls, and provides the states.

    `style` is one of `gpusim.gpu.inductor.styles`. Raises `CaptureError` for an unsupported torch, and for code of
    Inductor's that gpusim cannot read.
    """
    compiled = compiled_calls(graph, recorded, training, style)
    return _recorded(graph, recorded, compiled)


@dataclass(frozen=True)
class Compiled(Read):
    """Inductor's version of recorded calls."""

    named: dict[int, str]
    """Tensor id -> name of its input of the recorded graph."""

    def alike(self, recorded: Recorded) -> list[tuple[int, int, str]]:
        """Return the tensors with elements of results of `recorded`, as `Recorded.alike`."""
        pairs: list[tuple[int, int, str]] = []
        for mine, values in self.values.items():
            for value in values:
                results = recorded.results.get(value.node, ())
                theirs = results[value.index or 0] if (value.index or 0) < len(results) else None
                if theirs is not None:
                    pairs.append((mine, theirs, value.node))
        return pairs


def compiled_calls(
    graph: JointGraph,
    recorded: Recorded,
    training: bool,
    style: str = styles.DEFAULT_STYLE,
    apart: bool = False,
    noted: styles.Noted | None = None,
    traced: Traced | None = None,
) -> Compiled:
    """Compile the calls of a graph, whose inputs are among those of `recorded`. `apart`, `traced`: see
    `functional_graph`.

    Inductor's decisions are recorded in `noted`. Raises as `inductor_step`.
    """
    versions.require_supported()
    from torch._inductor import config
    from torch._inductor.virtualized import V

    noted = noted or styles.Noted()
    noted.style = style
    calls = {call.name: call for call in graph.calls}
    changed = {"fallback_random": True, **styles.settings_of(style)}
    with config.patch(versions.settings(**changed)), styles.decisions(style, noted):
        functional = functional_graph(graph, apart, traced)
        if styles.converts_images(style):
            functional = channels_last(functional)
        if styles.sums_products(style):
            functional = products_as_sums(functional)
        device = functional.fake_inputs[0].device
        ids = {name: index for index, name in recorded.named.items()}
        places = Places.of_inputs(functional, recorded, ids, device)
        begun = {index for index, tensor in enumerate(places.tensors) if tensor.init is not None}

        def read(lines: Lines) -> Read:
            noted.layout_optimized = bool(V.graph.layout_opt) and has_images(recorded)
            return read_lines(lines, functional, places, calls)

        compiled = compile_graph(functional, device.type, training, read, _own_suffix(style) if apart else "")
    named = _named(recorded, functional)
    if set(named) != begun:
        raise CaptureError("Inductor's graph does not begin with the states of the step")
    return Compiled(compiled.ops, compiled.places, compiled.outputs, compiled.sources, compiled.values, named)


def _own_suffix(style: str) -> str:
    """Return the end of kernel names in steps of the user's own, one for each style: see `OWN`."""
    return OWN if style == styles.DEFAULT_STYLE else f"{OWN}_{style}"


def has_images(recorded: Recorded) -> bool:
    """Whether a convolution works on images that are not channels last, by its weight: autocast may have cast it."""
    for op in recorded.ops:
        if op.target == str(torch.ops.aten.convolution.default):
            weight = recorded.tensors[op.args[1]["tensor"]]
            form = torch.empty_strided(weight.shape, weight.stride, device="meta")
            if form.dim() == 4 and not form.is_contiguous(memory_format=torch.channels_last):
                return True
    return False


def _recorded(graph: JointGraph, recorded: Recorded, compiled: Compiled) -> Recorded:
    """Return the compiled step with the initial and final values of the ATen step."""
    places, named = compiled.places, compiled.named
    outputs, gradients = compiled.outputs[: len(graph.outputs)], compiled.outputs[len(graph.outputs) :]
    roles: tuple[tuple[list[int], Role], ...] = ((outputs, "output"), (gradients, "gradient"))
    for indices, role in roles:
        set_roles(places.tensors, indices, role)
    returned = iter(outputs)  # the user step's computed results are its outputs, in this order
    fused = replace(
        recorded,
        returned=[None if index is None else next(returned) for index in recorded.returned],
        ops=compiled.ops,
        tensors=places.tensors,
        storages=places.storages,
        outputs=outputs,
        gradients=gradients,
        initial=places.constants,
        named=named,
        sources=[Source(sha256=sha256, text=text) for sha256, text in compiled.sources.items()],
        results={},
        alike=compiled.alike(recorded),
    )
    return with_values(fused, recorded)


def with_values(fused: Recorded, recorded: Recorded) -> Recorded:
    """Give a step of kernels the initial and final values of a recording of the same step as ATen calls."""
    before = {name: index for index, name in recorded.named.items()}
    final: dict[int, torch.Tensor] = {}
    for mine, theirs in zip((*fused.outputs, *fused.gradients), (*recorded.outputs, *recorded.gradients), strict=True):
        final[mine] = recorded.final[theirs]
    for index, name in fused.named.items():
        if before[name] in recorded.final:
            final[index] = recorded.final[before[name]]
    begun = {index: recorded.initial[before[name]] for index, name in fused.named.items()}
    return replace(fused, initial=fused.initial | begun, final=final)


def _named(recorded: Recorded, functional: FunctionalGraph) -> dict[int, str]:
    """Return tensor id -> input of the recorded graph: `Places.of_inputs` adds them first, in this order."""
    known = set(recorded.named.values())
    names = [name for given in functional.inputs for name in given.names if name in known]
    return dict(enumerate(names))
