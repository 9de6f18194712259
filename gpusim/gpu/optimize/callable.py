"""The callable that `gpusim.optimize` returns: it runs the captured step for its arguments, or the user's own step."""

from __future__ import annotations

import threading
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch.utils import _pytree as pytree

from gpusim.errors import CaptureError, StepError
from gpusim.formats.trace import Frontend
from gpusim.gpu.optimize.alone import alone
from gpusim.gpu.optimize.fronts import CANNOT
from gpusim.gpu.optimize.modes import Modes
from gpusim.gpu.optimize.steps import (
    TENSORS,
    Given,
    attribute_problem,
    autocast_of,
    check_arguments,
    settings,
    value_of,
    which_same,
)
from gpusim.gpu.optimize.variant import Variant
from gpusim.gpu.reach.search import BEHIND
from gpusim.notebook import html_table, short_name, short_repr
from gpusim.text import first_line, short_value
from gpusim.units import counted, format_bytes, format_ns

#: Most captured steps of one callable: for other shapes, modes and options. Further ones run uncaptured.
MOST_VARIANTS: Final = 8
#: Captures in a row of one of them that were called less than so often. After these, it runs uncaptured whenever an
#: option or a Python value differs from the last capture's: capturing takes longer than such a capture saves.
MOST_SHORT, SHORT_CALLS = 3, 100


_WHOSE: Final[dict[Frontend, str]] = {"aten": "ATen", "inductor": "Inductor"}


@dataclass(frozen=True)
class Gain:
    """Gain of the optimized step, with times of one call in ns.

    The sequential graph has the same kernels, and one recording where the step may have the fastest of several.
    """

    eager_ns: int
    sequential_ns: int
    optimized_ns: int
    predicted_ns: int
    predicted_sequential_ns: int
    streams: int
    policy: str
    kernels_chosen: bool
    """Whether any op runs another kernel than the captured one."""
    peak_bytes: int
    decided_by: str
    worst_error: float
    bit_equal: bool = False
    """Whether all results are eager's, bit for bit."""
    interval_ns: tuple[int, int] = (0, 0)
    """Interval of the graph's prediction."""
    frontend: Frontend = "aten"
    """Origin of the kernels: `inductor` if any kernel is Inductor's."""
    mixed: bool = False
    """Whether some regions of the step run Inductor's kernels and others ATen's calls."""
    around_ns: int = 0
    """GPU time of a call beyond the step's own kernels, in ns: copies of inputs and results, measured with an empty
    graph in place of the step's.
    """
    around_sequential_ns: int = 0
    """The same, measured around the sequential graph of the same kernels; 0 where a cache has the schedule."""
    host_ns: int = 0
    """Host time of a call, in ns."""
    device_ns: int = 0
    """GPU time of the graph without these copies, in ns, where the host launches it early enough."""
    call_device_ns: int = 0
    """GPU time of a whole call in ns, where the host is early enough."""
    launch_ns: int = 0
    """Host time of the graph's launch, in ns."""
    stages_s: Mapping[str, float] = field(default_factory=dict)
    """Stage of the optimization -> its time in s."""
    without: str = ""
    """Reason why requested kernels of Inductor were not tried."""

    @property
    def predicted_call_ns(self) -> int:
        """Predicted time of one of many calls in a row, in ns: the longer of the GPU's and the host's time."""
        return self._call_ns(self.predicted_ns)

    @property
    def predicted_call_interval_ns(self) -> tuple[int, int]:
        """Interval of that prediction, in ns."""
        low, high = self.interval_ns
        return self._call_ns(low), self._call_ns(high)

    def _call_ns(self, graph_ns: int) -> int:
        return max(graph_ns + self.around_ns, self.host_ns)

    @property
    def text(self) -> str:
        """Summarize the gain in one line."""
        over = self.eager_ns / max(1, self.optimized_ns)
        sequential = self.sequential_ns / max(1, self.optimized_ns)
        whose = "ATen and Inductor by region" if self.mixed else _WHOSE[self.frontend]
        without = f"; without Inductor's kernels: {self.without}" if self.without else ""
        return (
            f"{format_ns(self.optimized_ns)} a step, {over:.2f}x over eager ({format_ns(self.eager_ns)}) and "
            f"{sequential:.2f}x over one CUDA graph on one stream; {self.streams} streams "
            f"({short_value(self.policy)}), kernels of {whose}, {format_bytes(self.peak_bytes)}; "
            f"decided by {self.decided_by}{without}"
        )

    def __repr__(self) -> str:
        return short_repr("Gain", self.text)

    def _repr_html_(self) -> str:
        rows = [
            ("eager", format_ns(self.eager_ns)),
            ("one CUDA graph on one stream", format_ns(self.sequential_ns)),
            (f"{counted(self.streams, 'stream')} in the graph ({self.policy})", format_ns(self.optimized_ns)),
            ("predicted", format_ns(self.predicted_ns)),
            ("peak memory", format_bytes(self.peak_bytes)),
            ("worst error", f"{self.worst_error:.2g}"),
        ]
        return html_table("Gain, one step", ("", ""), rows)


Make = Callable[[tuple[Any, ...], dict[str, Any]], tuple[Variant, Gain]]


class OptimizedStep:
    """A step that runs the best schedule found, called like the user's own, from any thread. `gain` has the result of
    the optimization.
    """

    def __init__(self, given: Given, device: torch.device, modules: Sequence[torch.nn.Module], make: Make) -> None:
        self._given, self._device, self._make = given, device, make
        self._variants: dict[Any, Variant | None] = {}
        self._modes = Modes(modules)
        self._short: Counter[Any] = Counter()
        """Captures in a row that were called a few times only."""
        self._lock = threading.RLock()
        self._warned: set[str] = set()
        self.gain: Gain | None = None
        self.__wrapped__ = given.target
        vars(self)[BEHIND] = given.behind

    def __repr__(self) -> str:
        target = self._given.target
        name = short_name(getattr(target, "__name__", type(target).__name__))
        return short_repr("OptimizedStep", f"{name}: {self.gain.text if self.gain else 'unoptimized'}")

    def _repr_html_(self) -> str:
        return self.gain._repr_html_() if self.gain else html_table(repr(self), (), ())

    def __reduce__(self) -> Any:
        raise TypeError(
            "a step from gpusim.optimize runs on its model's own memory and cannot be copied or pickled: copy the "
            "model or its state_dict(), and optimize the copy"
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run one step."""
        with self._lock:
            fast = self._fast(args, kwargs)
            if fast is not None:
                variant, tensors = fast
                return variant.run(tensors)
        return self._given.eager(args, kwargs, self._device)

    def _fast(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Variant, Sequence[torch.Tensor]] | None:
        """Return the captured step for these arguments with the tensors among them, or None to run the user's own."""
        try:
            tensors, key = self._key(args, kwargs)
        except CaptureError as cause:
            self._warn(f"{cause}; the step runs as it is")
            return None
        variant = self._variants.get(key)
        if variant is not None and not variant.captured.hooks.hold():
            self._warn("hooks have changed since the step was captured; while they differ, the step runs as it is")
            return None
        if variant is None or not variant.is_current():
            variant = self._other(key, variant, args, kwargs)
            if variant is not None and not variant.is_current():  # captured where its questions have other answers
                return None
        if variant is not None and (problem := attribute_problem(tensors, lambda: variant.captured.reads.names)):
            self._warn(f"{problem}; it runs as it is")
            return None
        if variant is not None and variant.mixes(tensors):
            self._warn("arguments share memory, or lie in the model's, and the step changes it; it runs as it is")
            return None
        if variant is None or any(tensor.requires_grad for tensor in tensors):
            return None
        if (variant.trains and not torch.is_grad_enabled()) or not variant.adopt():
            return None
        return variant, tensors

    def _key(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Sequence[torch.Tensor], Any]:
        """Return the tensors among the arguments, and the key of a captured step: all that it depends on except
        elements.
        """
        tensors: Sequence[torch.Tensor] = args
        others: Any = len(args)
        if kwargs or not TENSORS.issuperset(map(type, args)):
            leaves, spec = pytree.tree_flatten((args, kwargs))
            check_arguments(leaves)
            tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
            others = (spec, *(None if isinstance(leaf, torch.Tensor) else value_of(leaf) for leaf in leaves))
        try:
            shapes = tuple([(tensor.shape, tensor.dtype, tensor.device, tensor.layout) for tensor in tensors])
        except RuntimeError as cause:
            raise CaptureError(
                "an argument is a nested tensor, which has no shape: only plain ones can be captured"
            ) from cause
        same = which_same(tensors)
        return tensors, (shapes, same, others, self._modes.number(), autocast_of(self._device), settings())

    def _other(self, key: Any, former: Variant | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Variant | None:
        """Return a step for new arguments, or in place of a `former` one, captured unless there are too many.

        None while another step is being optimized.
        """
        if former is not None:
            self._short[key] = self._short[key] + 1 if former.calls < SHORT_CALLS else 0
            if self._short[key] > MOST_SHORT:
                self._warn("its options or Python values change too often; while they differ, the step runs as it is")
                return None
        if key in self._variants and self._variants[key] is None:
            return None
        if len(self._variants) >= MOST_VARIANTS and key not in self._variants:
            self._warn(f"more than {MOST_VARIANTS} shapes, modes or options: further ones run as they are")
            return None
        try:
            with alone(wait=False) as free:
                if not free:
                    return None
                self._prepared(key, args, kwargs)
        except StepError:
            return None
        except CANNOT as cause:
            self._variants[key] = None
            self._warn(f"{first_line(cause)}; the step runs as it is")
        return self._variants[key]

    def prepare(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Capture and search for these arguments. Raises the errors in `CANNOT`."""
        with alone(wait=True) as free:
            if not free:
                raise CaptureError("it is a part of a step that is being optimized")
            self._prepared(self._key(args, kwargs)[1], args, kwargs)

    def _prepared(self, key: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._variants[key], self.gain = self._make(args, kwargs)
        self._modes.watch(self._given.step(args, kwargs, self._device).modules.values())

    def _warn(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            warnings.warn(f"gpusim.optimize: {text}", stacklevel=5)
