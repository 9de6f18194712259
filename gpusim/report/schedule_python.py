"""A schedule as Python code: the operators of the step under `with torch.cuda.stream(...)`, with the fewest events.

For people who write streams by hand. For a captured step the code is complete: `step` takes the tensors that exist
before the step and returns its results. An imported step has no arguments and a compiled one has its own kernels, so
their code calls `run` with the name of each op in the right order, on the right stream. All results are kept until the
end of `step`, so memory allocated on a stream is not reused while another stream still reads it.

The code contains names and values of the trace, which may be untrusted: operators come from the allow-list of
replay, names become identifiers, and texts are written as `repr` writes them.
"""

from __future__ import annotations

import keyword
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, Final

from gpusim.analysis.simulation import Simulated
from gpusim.formats.arguments import TENSOR
from gpusim.formats.trace import Op, Trace
from gpusim.gpu.replay.allowlist import check_operators
from gpusim.plan.sync import SyncPlan, works
from gpusim.report.schedule_table import summary, sync_of
from gpusim.text import shortened, visible
from gpusim.version import code_version

#: Names used by the code itself.
_TAKEN: Final = frozenset(
    ("torch", "torchvision", "aten", "s", "begin", "step", "tensors", "device", "run", "some", "STREAMS")
)
#: Operators that change the shape of their first argument in place; in the code its tensor keeps its shape.
VIEWS_IN_PLACE: Final = frozenset(
    ("as_strided_", "detach_", "squeeze_", "swapaxes_", "swapdims_", "t_", "transpose_", "unsqueeze_")
)
_INDENT: Final = "    "
MAX_COMMENT: Final = 90


def schedule_python(simulated: Simulated, file: str = "") -> str:
    """Return the code of a simulated schedule; `file` is the trace's, for messages.

    Raises `OperatorError` for an operator that replay would refuse.
    """
    trace = simulated.graph.trace
    lines = list(_head(simulated))
    if trace.provenance.imported_from is None and trace.model.frontend == "aten":
        check_operators(trace, file or trace.name)
        lines += _Captured(simulated).lines()
    else:
        lines += _Named(simulated).lines()
    return "\n".join(lines) + "\n"


def _head(simulated: Simulated) -> Iterator[str]:
    trace, schedule = simulated.graph.trace, simulated.schedule
    yield f"# {summary(simulated)}."
    yield f"# Written by gpusim {code_version()}. A wait is there only where nothing else says that the op has ended."
    other = [trace.ops[op].name for op, number in enumerate(schedule.variants) if number]
    if other:
        yield f"# {len(other)} ops run here with their usual kernels, in the schedule with others (variants), such as"
        yield f"# {_comment(', '.join(other[:3]))}."
    if schedule.partitions:
        yield "# The schedule also gives streams SMs of their own (partitions), which is not done here."
    yield ""
    yield "import torch"
    if any(op.target.startswith("torchvision.") for op in trace.ops):
        yield "import torchvision  # its operators"
    yield ""
    yield f"STREAMS = {schedule.stream_count}"
    yield ""
    yield ""


class _Code(ABC):
    """Code common to both kinds of steps: streams, events, and launch order."""

    def __init__(self, simulated: Simulated) -> None:
        self.trace: Trace = simulated.graph.trace
        self.schedule = simulated.schedule
        self.sync: SyncPlan = sync_of(simulated)
        self._names: dict[object, str] = {}
        self._used: set[str] = set(_TAKEN)

    def name(self, key: object, text: str) -> str:
        """Return a unique identifier for `key`, as close to `text` as possible."""
        identifier = self._names.get(key)
        if identifier is None:
            base = re.sub(r"[^A-Za-z0-9_]+", "_", text)[:60].strip("_") or "t"
            base = f"t_{base}" if base[0].isdigit() or keyword.iskeyword(base) or keyword.issoftkeyword(base) else base
            identifier, number = base, 2
            while identifier in self._used:
                identifier, number = f"{base}_{number}", number + 1
            self._names[key] = identifier
            self._used.add(identifier)
        return identifier

    def done(self, op: int) -> str:
        """Return the name of the event after an op."""
        return self.name(("done", op), f"done_{self.trace.ops[op].name}")

    def body(self) -> Iterator[str]:
        """Yield the lines with the streams, the ops on them, and the waits at the end."""
        yield "s = [torch.cuda.current_stream(), *(torch.cuda.Stream() for _ in range(STREAMS - 1))]"
        if self.sync.roots:
            yield "begin = s[0].record_event()"
            for stream in sorted(self.sync.roots):
                yield f"s[{stream}].wait_event(begin)"
        current = -1
        layer = ""
        for op, waits in zip(self.schedule.order, self.sync.waits, strict=True):
            recorded = self.trace.ops[op]
            stream = self.schedule.streams[op] if works(recorded) or current < 0 else current
            if stream != current:
                yield f"with torch.cuda.stream(s[{stream}]):"
                current = stream
            if recorded.layer != layer and recorded.layer:
                yield f"{_INDENT}# {_comment(recorded.layer)}"
            layer = recorded.layer
            for before in waits:
                yield f"{_INDENT}s[{stream}].wait_event({self.done(before)})"
            yield _INDENT + self.call(op)
            if op in self.sync.records:
                yield f"{_INDENT}{self.done(op)} = s[{stream}].record_event()"
        for op in self.sync.ends:
            yield f"s[0].wait_event({self.done(op)})"

    @abstractmethod
    def call(self, op: int) -> str:
        """Return the line that runs an op."""


class _Named(_Code):
    """Code of an imported or compiled step, whose ops the caller runs by name."""

    def lines(self) -> Iterator[str]:
        """Yield the lines of the function `step`."""
        yield "def step(run):"
        yield f'{_INDENT}"""Call `run` with the name of each op, on the current stream."""'
        for line in self.body():
            yield _INDENT + line

    def call(self, op: int) -> str:
        recorded = self.trace.ops[op]
        return f"run({recorded.name!a})  # {_comment(recorded.target)}"


def given_names(trace: Trace) -> dict[int, str]:
    """Return keys of the tensors that exist before the step: their names, or `given_4` for an unnamed one."""
    given = [index for index, tensor in enumerate(trace.tensors) if tensor.init is not None]
    times = Counter(trace.tensors[index].name for index in given)
    return {
        index: text if (text := trace.tensors[index].name) and times[text] == 1 else f"given_{index}" for index in given
    }


class _Captured(_Code):
    """Code of a captured step, with all arguments from the trace."""

    def lines(self) -> Iterator[str]:
        """Yield the lines of the function `step`."""
        keys = given_names(self.trace)
        names = {index: self.name(index, key) for index, key in keys.items()}
        body = list(self.body())  # names the results, after the given tensors
        if any(leaves_out(op) for op in self.trace.ops):
            yield from _SOME
        yield "@torch.no_grad()"
        yield 'def step(tensors, device="cuda"):'
        yield f'{_INDENT}"""Run the step on `tensors`, which exist before it and may change; returns its results."""'
        if any("aten." in line for line in body):
            yield f"{_INDENT}aten = torch.ops.aten"
        for index, key in keys.items():
            yield f"{_INDENT}{names[index]} = tensors[{key!a}]"
        for line in body:
            yield _INDENT + line
        results = [
            self.name(index, f"t{index}")
            for index, tensor in enumerate(self.trace.tensors)
            if tensor.role in ("output", "gradient") and index in self._names
        ]
        yield f"{_INDENT}return {{{', '.join(f'{name!a}: {name}' for name in results)}}}"

    def call(self, op: int) -> str:
        recorded = self.trace.ops[op]
        words = [self.value(value) for value in recorded.args]
        if recorded.target.split(".")[1] in VIEWS_IN_PLACE and words:
            words[0] = f"{words[0]}.detach()"
        words += [f"{_identifier(name)}={self.value(value)}" for name, value in recorded.kwargs.items()]
        operator = recorded.target if recorded.target.startswith("aten.") else f"torch.ops.{recorded.target}"
        called = f"{operator}({', '.join(words)})"
        results = self.results(recorded)
        if results and leaves_out(recorded):
            return f"[{results}] = some({called})"
        return f"{results} = {called}" if results else called

    def results(self, op: Op) -> str:
        """Return the assignment targets for the results of an op; empty if none is used."""
        if all(index is None for index in op.outputs):
            return ""
        names = []
        for place, index in enumerate(op.outputs):
            text = op.name if len(op.outputs) == 1 else f"{op.name}_{place}"
            names.append("_" if index is None else self.name(index, text))
        return f"[{', '.join(names)}]" if returns_list(op.target) else ", ".join(names)

    def value(self, value: Any) -> str:
        """Return an encoded argument as Python code; `check_operators` has checked all of them."""
        if isinstance(value, list | tuple):
            return f"[{', '.join(self.value(part) for part in value)}]"
        if not isinstance(value, dict):
            return ascii(value)
        tag, inner = next(iter(value.items()))
        if tag == TENSOR:
            return self.name(inner, f"t{inner}")
        if tag == "float":
            return f"float({inner!a})"
        return "device" if tag == "device" else f"torch.{_identifier(inner)}"


#: Operators that return a list, even of one tensor, besides all out-of-place `_foreach_` ones.
_LISTS: Final = frozenset(("split", "split_with_sizes", "unbind", "chunk", "unsafe_split", "unsafe_split_with_sizes"))


def returns_list(target: str) -> bool:
    """Return True if an operator returns a list of tensors."""
    name = target.split(".")[1]
    return name in _LISTS or (name.startswith("_foreach_") and not name.endswith("_"))


def leaves_out(op: Op) -> bool:
    """Return True if an operator has a mask, a list of booleans, of results to compute."""
    return any(isinstance(value, list | tuple) and value and _all_booleans(value) for value in op.args)


def _all_booleans(values: Sequence[Any]) -> bool:
    return all(isinstance(value, bool) for value in values)


_SOME: Final = (
    "def some(results):",
    f'{_INDENT}"""Return the results of an operator without those it left out (None)."""',
    f"{_INDENT}return [result for result in results if result is not None]",
    "",
    "",
)


def _identifier(text: str) -> str:
    """Return a valid identifier unchanged. Raises `ValueError` otherwise, since the code will be run."""
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", text):
        raise ValueError(f"{text!a} is no name")
    return text


def _comment(text: str) -> str:
    return visible(shortened(text, MAX_COMMENT))
