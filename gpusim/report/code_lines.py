"""Code for a verdict: one CUDA graph, `gpusim.optimize`, the backend, or streams by hand."""

from __future__ import annotations

import textwrap
from typing import Final

from gpusim.analysis.side_by_side import Concurrency, SideBySide
from gpusim.formats.trace import Mode
from gpusim.text import visible
from gpusim.units import counted

#: Maximum number of sides of a module in the code by hand.
MOST_SIDES: Final = 6
#: Maximum number of modules named; the others are counted.
MOST_NAMES: Final = 3

CAPTURE: Final = textwrap.dedent(
    """
    import gpusim

    step = gpusim.capture(
        model, (x,), targets=(y,),
        loss=loss_fn, optimizer=optimizer,
    )
    step.save("step.json.gz")
    """
).strip()

_GRAPH: Final = {
    "infer": """
        import torch

        static_x = x.clone()  # each batch is copied into it
        with torch.no_grad():
            model(static_x)  # warm up
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                static_y = model(static_x)

        static_x.copy_(x)
        graph.replay()  # static_y has the result
        """,
    "train": """
        import torch

        static_x, static_y = x.clone(), y.clone()  # each batch is copied into them

        def step():
            optimizer.zero_grad(set_to_none=False)
            loss = loss_fn(model(static_x), static_y)
            loss.backward()
            optimizer.step()  # an optimizer with capturable=True
            return loss

        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            step()  # warm up
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            static_loss = step()

        for x, y in loader:
            static_x.copy_(x)
            static_y.copy_(y)
            graph.replay()
        """,
}
_OPTIMIZE: Final = {
    "infer": """
        import gpusim

        fast = gpusim.optimize(model, (x,), streams={streams})
        y = fast(x)  # what model(x) gives
        """,
    "train": """
        import gpusim

        def step(x, y):
            optimizer.zero_grad()
            loss = loss_fn(model(x), y)
            loss.backward()
            optimizer.step()
            return loss

        fast = gpusim.optimize(step, (x, y), streams={streams})
        for x, y in loader:
            loss = fast(x, y)
        """,
}
_BACKEND: Final = """
    import torch

    model = torch.compile(model, backend="gpusim", options={{"streams": {streams}}})
    """


def graph_lines(mode: Mode) -> str:
    """Return code for one CUDA graph around the step, without gpusim."""
    return textwrap.dedent(_GRAPH[mode]).strip()


def optimize_lines(mode: Mode, streams: int) -> str:
    """Return code for `gpusim.optimize` on a model or a training step."""
    return textwrap.dedent(_OPTIMIZE[mode]).strip().format(streams=streams)


def backend_lines(streams: int) -> str:
    """Return code for `torch.compile` with gpusim as its backend."""
    return textwrap.dedent(_BACKEND).strip().format(streams=streams)


def by_hand_lines(concurrency: Concurrency) -> str:
    """Return code with streams in the `forward` of the modules that overlap most; empty if no module does."""
    row = next((row for row in concurrency.rows if row.kind == "modules" and "forward" in row.phases), None)
    if row is None:
        return ""
    sides = row.sides[:MOST_SIDES]
    more = len(row.sides) - len(sides)
    lines = [
        f"# In forward() of {parents_in_words(row)}; inside the capture of one CUDA graph.",
        "main = torch.cuda.current_stream()",
        f"side_streams = [torch.cuda.Stream() for _ in range({len(sides) - 1})]  # made once, in __init__",
        "for stream in side_streams:",
        "    stream.wait_stream(main)",
        f"out_0 = {_called(sides[0])}",
    ]
    for number, side in enumerate(sides[1:], 1):
        lines += [f"with torch.cuda.stream(side_streams[{number - 1}]):", f"    out_{number} = {_called(side)}"]
    if more:
        lines.append(f"# ... {counted(more, 'more side')} like these")
    lines += ["for stream in side_streams:", "    main.wait_stream(stream)"]
    return "\n".join(["import torch", "", *lines])


def _called(side: tuple[str, ...]) -> str:
    """Return the calls of the children of one side, in sequence."""
    text = "x"
    for name in side:
        child = f"self.{name}" if name.isidentifier() else f"self[{name}]" if name.isdecimal() else f"self[{name!r}]"
        text = f"{child}({text})"
    return visible(text)


def parents_in_words(row: SideBySide) -> str:
    """Return the modules in words: `inception3a, inception3b, inception4a and 6 more modules`, or `the model`."""
    names = [visible(parent) or "the model" for parent in row.parents]
    if len(names) <= MOST_NAMES + 1:
        return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))
    return f"{', '.join(names[:MOST_NAMES])} and {counted(len(names) - MOST_NAMES, 'more module')}"


def sides_in_words(row: SideBySide) -> list[str]:
    """Return each side in words: its children, joined by arrows in sequence."""
    return [visible(" → ".join(side)) for side in row.sides]


def kind_in_words(row: SideBySide) -> str:
    """Return the kind of overlap in words, if it is not of modules."""
    return {
        "modules": "",
        "weight gradients": "Weight gradients, concurrent with the chain of data gradients",
        "optimizer": "Optimizer updates during the backward pass",
        "buffers": "Updates of buffers, such as BatchNorm's counters, during the rest",
    }[row.kind]
