#!/usr/bin/env python3
"""Compare steps scaled to other GPUs with published measurements on those GPUs.

    python scripts/compare_other_gpus.py

Writes research/data/other_gpus.md. With --check nothing is written; the exit status is 1 where it is out of date.

The comparison: a step captured on an H200, scaled to the GPU by `gpusim/rules/other_gpus.py` and simulated as one CUDA
graph on one stream, against the published throughput of the same network, mode and image size. Batches, libraries and
years differ; each row has them. Three kinds of published figures are left out:

- host-bound programs, such as eager PyTorch at batch 1 to 12 except for VGG-16: they do not test a GPU;
- steps in BF16 on a V100, which has no unit for it;
- FP32 or TF32 against FP16.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import median

import gpusim
from gpusim.io.files import write_bytes

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "research" / "data" / "other_gpus.md"
NVIDIA = "[NVIDIA DeepLearningExamples](https://github.com/NVIDIA/DeepLearningExamples)"
LAMBDA = "[lambdal/deeplearning-benchmark](https://github.com/lambdal/deeplearning-benchmark)"
TIMM = "[pytorch-image-models](https://github.com/huggingface/pytorch-image-models)"
TIMM_ROW = f"{TIMM} `results/benchmark-infer-amp-nhwc-pt240-cu124-rtx4090.csv`"
CONVNETS = "Classification/ConvNets"
LAMBDA_ROW = f"{LAMBDA} `pytorch/pytorch-train-throughput-fp32.csv`, column resnet50, row"
LAMBDA_TF = "[Lambda, TensorFlow 1.12](https://lambdalabs.com/blog/2080-ti-deep-learning-benchmarks), column V100"
XHMY = "[XHMY/torch_benchmark](https://github.com/XHMY/torch_benchmark) README, PyTorch 2.1, TF32 by its matrix test"
OPENBAYES = (
    "[aisensiy/pytorch-gpu-benchmark](https://github.com/aisensiy/pytorch-gpu-benchmark) "
    "`experiment_results/openbayes/Tesla_V100-SXM2-16GB_1_gpus`, float, train, column vgg16: median 64.6 ms"
)
FROM = {
    "resnet50": "validate/traces/memory/resnet50-train-b16",
    "vgg16": "validate/traces/memory/vgg16-train-b16",
    "inception_v3": "validate/traces/search_training_large/inception_v3-train-b32",
    "inception_v4": "validate/traces/unseen/inception_v4-train-b16",
    "vit_b_16": "validate/traces/unseen_large/vit_b_16-train-b8",
    "efficientnet_b0": "validate/traces/fidelity/efficientnet_b0-train-b16-bf16",
    "efficientnet_v2_s": "validate/traces/kinds/efficientnet_v2_s-infer-b32-bf16",
    "dpn68b": "validate/traces/blind_kinds/dpn68b-infer-b16-bf16",
}


@dataclass(frozen=True)
class Published:
    """Published throughput of one GPU, in images/s."""

    hardware: str
    network: str
    per_s: float
    how: str
    """Precision and batch; a question mark where the source does not give the batch."""
    source: str


PUBLISHED = (
    Published("v100", "resnet50", 367, "FP32, ?", f"{NVIDIA} `PyTorch/{CONVNETS}/resnet50v1.5`, DGX-1 16 GB, 21.03"),
    Published("v100", "resnet50", 369, "FP32, ?", f"{LAMBDA_ROW} LambdaCloud V100 16GB"),
    Published("v100", "resnet50", 405, "FP32, ?", f"{LAMBDA_TF}, row ResNet-50"),
    Published("v100", "inception_v3", 259, "FP32, ?", f"{LAMBDA_TF}, row Inception v3"),
    Published("v100", "inception_v4", 112, "FP32, ?", f"{LAMBDA_TF}, row Inception v4"),
    Published("v100", "vgg16", 12 / 0.0646, "FP32, 12", OPENBAYES),
    Published("a100-80gb", "resnet50", 938, "TF32, ?", f"{NVIDIA} `PyTorch/{CONVNETS}/resnet50v1.5`, A100 80GB, 21.03"),
    Published("a100-80gb", "resnet50", 1066, "TF32, ?", f"{LAMBDA_ROW} A100 80GB SXM4"),
    Published(
        "a100-80gb", "efficientnet_b0", 2489, "FP16, ?", f"{NVIDIA} `PyTorch/{CONVNETS}/efficientnet`, A100 80GB, 21.03"
    ),
    Published(
        "a100-80gb", "efficientnet_v2_s", 2062, "FP16, 512",
        f"{NVIDIA} `TensorFlow2/{CONVNETS}/efficientnet_v2`, A100 80GB, 384x384, 21.09",
    ),
    Published("rtx4090", "resnet50", 721, "TF32, ?", f"{LAMBDA_ROW} RTX 4090"),
    Published("rtx4090", "resnet50", 641, "TF32, 64", XHMY),
    Published("rtx4090", "vit_b_16", 337, "TF32, 64", XHMY),
    Published(
        "rtx4090", "efficientnet_v2_s", 1652, "FP16, 512",
        f"{TIMM_ROW}, efficientnetv2_s, 384",
    ),
    Published("rtx4090", "dpn68b", 4887, "FP16, 512", f"{TIMM_ROW}, dpn68b, 224"),
)  # fmt: skip


@dataclass(frozen=True)
class Compared:
    """A published and a predicted throughput."""

    published: Published
    trace: str
    per_s: float

    @property
    def ratio(self) -> float:
        """Predicted over published throughput."""
        return self.per_s / self.published.per_s

    @property
    def factor(self) -> float:
        """Factor between the two, at least 1."""
        return max(self.ratio, 1 / self.ratio)


@cache
def predicted_per_s(hardware: str, trace: str) -> float:
    """Return the images/s of a step as one sequential CUDA graph on another GPU."""
    step = gpusim.load(ROOT / f"{trace}.json.gz", hardware)
    return step.trace.model.batch / gpusim.simulate(step, "sequential", streams=1).makespan_ns * 1e9


def compared() -> list[Compared]:
    """Return every published throughput with its prediction."""
    rows = []
    for published in PUBLISHED:
        trace = FROM[published.network]
        rows.append(Compared(published, Path(trace).name, predicted_per_s(published.hardware, trace)))
    return rows


def page(rows: Sequence[Compared]) -> str:
    """Return the table of all rows, and its summary."""
    factors = [row.factor for row in rows]
    lines = [
        "# Steps of an H200 scaled to other GPUs",
        "",
        "Written by `python scripts/compare_other_gpus.py`, which says what compares with what and what was left out.",
        f"{len(rows)} published throughputs of {len({row.published.network for row in rows})} networks: median factor "
        f"{median(factors):.2f}, largest {max(factors):.2f}. The scaling was not fitted to them.",
        "",
        "| GPU | step | images/s predicted | images/s published | ratio | precision, batch there | source |",
        "|---|---|--:|--:|--:|---|---|",
    ]
    for row in rows:
        published = row.published
        lines.append(
            f"| {published.hardware} | {row.trace} | {row.per_s:.0f} | {published.per_s:.0f} | {row.ratio:.2f} "
            f"| {published.how} | {published.source} |"
        )
    lines += ["", "| GPU | networks | rows | median factor | largest |", "|---|--:|--:|--:|--:|"]
    for hardware in dict.fromkeys(row.published.hardware for row in rows):
        some = [row for row in rows if row.published.hardware == hardware]
        each = [row.factor for row in some]
        networks = len({row.published.network for row in some})
        lines.append(f"| {hardware} | {networks} | {len(some)} | {median(each):.2f} | {max(each):.2f} |")
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Write or check the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only say whether the page is up to date")
    options = parser.parse_args(arguments)
    text = page(compared())
    if options.check:
        if text != PAGE.read_text(encoding="utf-8"):
            print("research/data/other_gpus.md is out of date: run python scripts/compare_other_gpus.py")
            return 1
        return 0
    write_bytes(PAGE, text.encode())
    print(PAGE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
