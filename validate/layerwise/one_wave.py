"""How much of a layer's time is in kernels of one wave: python validate/layerwise/one_wave.py.

Of captured training steps of convolutional networks in TF32 under `validate/traces` (H200), by the kind of layer: the
share of its kernels' time in matrix products and convolutions whose blocks all run at once. Source of
`gpusim.layerwise.made_up.ONE_WAVE`.
"""

from __future__ import annotations

from pathlib import Path

from gpusim.layerwise.from_trace import layers_of
from gpusim.step import Step, load

TRACES = Path(__file__).resolve().parents[1] / "traces"
KINDS = ("convolution", "linear")
#: Set and step. Two batches of one network are two steps.
STEPS = (
    "memory/vgg16-train-b16",
    "memory/resnet50-train-b16",
    "search_training/resnet50-train-b8",
    "search_training/densenet121-train-b8",
    "search_training/googlenet-train-b8",
    "search_training_32/googlenet-train-b32",
    "search_training/inception_v3-train-b8",
    "fidelity/inception_v3-train-b32",
    "blind_again/dla34-train-b16",
    "blind_again/inception_resnet_v2-train-b8",
    "unseen/inception_v4-train-b16",
)


def times_of(step: Step) -> dict[str, tuple[float, float]]:
    """Kind of layer -> time of its kernels in ns, and of those in one wave."""
    sms = step.graph.hardware.limits.sms
    times = {kind: [0.0, 0.0] for kind in KINDS}
    for layer in (each for each in layers_of(step.trace).layers if each.kind in KINDS):
        for op in (*layer.forward, *layer.backward):
            for task in step.graph.tasks[op]:
                one_wave = task.matrix and 0 < task.blocks <= sms * task.blocks_per_sm
                times[layer.kind][0] += task.dur_ns
                times[layer.kind][1] += task.dur_ns * one_wave
    return {kind: (total, inside) for kind, (total, inside) in times.items()}


def row(name: str, times: dict[str, tuple[float, float]]) -> str:
    """A row of the table; a step without layers of a kind has a dash."""
    cells = [f"{inside / total:.0%}" if total else "-" for total, inside in times.values()]
    return f"| {' | '.join([name, *cells])} |"


def main() -> int:
    """Print the table."""
    print(f"| step | {' | '.join(KINDS)} |\n|---|--:|--:|")
    every = dict.fromkeys(KINDS, (0.0, 0.0))
    for name in STEPS:
        times = times_of(load(TRACES / f"{name}.json.gz"))
        print(row(name, times))
        every = {kind: (every[kind][0] + times[kind][0], every[kind][1] + times[kind][1]) for kind in KINDS}
    print(row("all", every))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
