"""Plans of networks that no test has, executed on CPUs and compared with one device.

`python research/prototypes/plans_of_networks.py -o OUT.json [NETWORK...]` captures a training step of each by an
estimate, compares the network of its layers with torch's own module, and runs plans on 2 and 4 ranks (gloo, double
precision) against one device. It needs torchvision, timm and transformers.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

ROOT = Path(__file__).resolve().parents[2]
BATCH, CLASSES, WORDS, POSITIONS, SEED = 2, 6, 11, 8, 5
GPUS = (2, 4)
Made = tuple[nn.Module, torch.Tensor] | tuple[nn.Module, torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]


# --- Networks ---


def _torchvision(name: str, size: int, **words: Any) -> Callable[[int], Made]:
    def make(batch: int) -> Made:
        import torchvision

        model = getattr(torchvision.models, name)(weights=None, num_classes=CLASSES, **words)
        for module in model.modules():
            if isinstance(module, torchvision.ops.StochasticDepth):
                module.p = 0.0  # a random number of each sample, which nothing runs
        return model, torch.randn(batch, 3, size, size)

    return make


def _timm(name: str, size: int, **words: Any) -> Callable[[int], Made]:
    def make(batch: int) -> Made:
        import timm

        return timm.create_model(name, num_classes=CLASSES, **words), torch.randn(batch, 3, size, size)

    return make


def _vit(batch: int) -> Made:
    import torchvision

    model = torchvision.models.VisionTransformer(
        image_size=32, patch_size=16, num_layers=2, num_heads=4, hidden_dim=32, mlp_dim=64, num_classes=CLASSES
    )
    return model, torch.randn(batch, 3, 32, 32)


def r3d_18(batch: int) -> Made:
    """Return a network of videos."""
    import torchvision

    return torchvision.models.video.r3d_18(weights=None, num_classes=CLASSES), torch.randn(batch, 3, 4, 32, 32)


def words_loss(scores: torch.Tensor) -> torch.Tensor:
    """Return the loss of a class for each position."""
    target = torch.zeros(scores.shape[0] * scores.shape[1], dtype=torch.int64, device=scores.device)
    return functional.cross_entropy(scores.reshape(len(target), -1), target)


class _Scores(nn.Module):
    """A model of transformers, of which only the scores are returned."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        # Without a mask of its own, transformers looks at elements of positions, which no captured step may do.
        self.register_buffer("mask", torch.full((POSITIONS, POSITIONS), float("-inf")).triu(1)[None, None])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the scores."""
        if not self.model.config.is_decoder:
            return self.model(x).logits
        return self.model(x, attention_mask=self.mask, use_cache=False).logits


def _language(kind: str, attention: str = "sdpa", **words: Any) -> Callable[[int], Made]:
    def make(batch: int) -> Made:
        import transformers

        config = getattr(transformers, f"{kind}Config")(vocab_size=WORDS, **words)
        config.is_decoder = kind != "Bert"
        config._attn_implementation = attention
        model = getattr(transformers, "BertForMaskedLM" if kind == "Bert" else _CAUSAL[kind])(config)
        return _Scores(model), torch.randint(0, WORDS, (batch, POSITIONS)), words_loss

    return make


class _Translation(nn.Module):
    """An encoder and a decoder of transformers, of which only the scores are returned."""

    def __init__(self) -> None:
        super().__init__()
        import transformers

        words = {"vocab_size": WORDS, "d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 1, "num_heads": 4}
        config = transformers.T5Config(**words, dropout_rate=0.0, decoder_start_token_id=0)
        self.model = transformers.T5ForConditionalGeneration(config)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the scores."""
        return self.model(input_ids=x, decoder_input_ids=x, use_cache=False).logits


def t5(batch: int) -> Made:
    """Return a network of two sequences."""
    return _Translation(), torch.randint(0, WORDS, (batch, POSITIONS)), words_loss


_CAUSAL = {"Llama": "LlamaForCausalLM", "GPT2": "GPT2LMHeadModel", "Mistral": "MistralForCausalLM"}
_SMALL = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 16,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}

_SMALL_GPT2 = {"n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 16, "bos_token_id": None, "eos_token_id": None}

mobilenet_v3_small = _torchvision("mobilenet_v3_small", 64)
mobilenet_v2 = _torchvision("mobilenet_v2", 64)
shufflenet_v2_x0_5 = _torchvision("shufflenet_v2_x0_5", 64)
efficientnet_b0 = _torchvision("efficientnet_b0", 64)
convnext_tiny = _torchvision("convnext_tiny", 64)
regnet_y_400mf = _torchvision("regnet_y_400mf", 64)
swin_t = _torchvision("swin_t", 64)
swin_v2_t = _torchvision("swin_v2_t", 64)
vit = _vit
mnasnet0_5 = _torchvision("mnasnet0_5", 64)
squeezenet1_1 = _torchvision("squeezenet1_1", 64)
densenet121 = _torchvision("densenet121", 64)
mixer_s32_224 = _timm("mixer_s32_224", 224)
resmlp_12_224 = _timm("resmlp_12_224", 224)
edgenext_xx_small = _timm("edgenext_xx_small", 64)
ghostnet_100 = _timm("ghostnet_100", 64)
levit_128s = _timm("levit_128s", 224)
xcit_nano_12_p16_224 = _timm("xcit_nano_12_p16_224", 64)
maxvit_tiny_tf_224 = _timm("maxvit_tiny_tf_224", 64, img_size=64)
poolformer_s12 = _timm("poolformer_s12", 64)
repvgg_a0 = _timm("repvgg_a0", 64)
pvt_v2_b0 = _timm("pvt_v2_b0", 64)
llama = _language("Llama", **_SMALL, num_key_value_heads=2)
llama_eager = _language("Llama", "eager", **_SMALL, num_key_value_heads=2)
mistral = _language("Mistral", **_SMALL, num_key_value_heads=2, sliding_window=None)
gpt2 = _language("GPT2", **_SMALL_GPT2)
gpt2_without_dropout_of_attention = _language("GPT2", **_SMALL_GPT2, attn_pdrop=0.0)
bert = _language("Bert", **_SMALL)
resnext50_32x4d = _torchvision("resnext50_32x4d", 64)
res2net50_26w_4s = _timm("res2net50_26w_4s", 64)
cspdarknet53 = _timm("cspdarknet53", 64)
visformer_tiny = _timm("visformer_tiny", 224)
nfnet_l0 = _timm("nfnet_l0", 64)
NETWORKS = (
    *("mobilenet_v3_small", "mobilenet_v2", "shufflenet_v2_x0_5", "efficientnet_b0", "convnext_tiny"),
    *("regnet_y_400mf", "swin_t", "swin_v2_t", "vit", "mnasnet0_5", "squeezenet1_1", "densenet121", "mixer_s32_224"),
    *("resmlp_12_224", "edgenext_xx_small", "ghostnet_100", "levit_128s", "xcit_nano_12_p16_224", "maxvit_tiny_tf_224"),
    *("poolformer_s12", "repvgg_a0", "pvt_v2_b0", "llama", "llama_eager", "mistral", "gpt2", "bert"),
    *("gpt2_without_dropout_of_attention", "t5", "r3d_18", "resnext50_32x4d", "res2net50_26w_4s", "cspdarknet53"),
    *("visformer_tiny", "nfnet_l0"),
)


# --- One network ---


def captured(name: str) -> Any:
    """Capture a training step of a network by an estimate."""
    from gpusim.formats.hardware import load_hardware
    from gpusim.gpu.capture.estimate import capture_estimated
    from gpusim.gpu.capture.options import CaptureOptions

    options = CaptureOptions(spec=f"{Path(__file__).resolve()}:{name}", mode="train", batch=BATCH)
    return capture_estimated(options, load_hardware("h200"), lambda _: None)


def against_torch(name: str, trace: Any) -> dict[str, float]:
    """Compare the network of the layers, without dropout, with torch's module of the same weights."""
    from gpusim.gpu.layerwise.batch import make_data
    from gpusim.gpu.layerwise.check import SMALL
    from gpusim.gpu.layerwise.one_device import run_on_one_device
    from gpusim.layerwise.from_trace import layers_of

    cpu = torch.device("cpu")
    graph = _without_dropout(layers_of(trace))
    data = make_data(graph, 3, torch.float64, cpu)
    loss, gradients = run_on_one_device(graph, data, dtype=torch.float64, seed=SEED, device=cpu)
    model, like, *own_loss = globals()[name](BATCH)
    model = model.double().train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if hasattr(module, "drop_rate"):  # timm's, for calls of the function
            module.drop_rate = 0.0
    buffers = dict(model.named_buffers())
    for each in trace.tensors:  # an estimate does not know what is in them
        if each.role == "buffer" and each.name in buffers and each.init is not None and each.init.kind == "constant":
            buffers[each.name].fill_(each.init.a)
    parameters = _with_weights(model, trace, graph)
    inputs = data.inputs.reshape(like.shape)
    if like.ndim == 5:  # depth and width are one dimension of a layer
        n, c, depth, height, width = like.shape
        inputs = data.inputs.reshape(n, c, height, depth, width).transpose(2, 3)
    found = model(inputs if like.is_floating_point() else inputs.long())
    if isinstance(found, list | tuple):
        found = found[0]
    if own_loss:
        targets = data.targets.reshape(-1)
        whole = functional.cross_entropy(found.reshape(len(targets), -1), targets)
    else:
        whole = functional.cross_entropy(found, data.targets)
    whole.backward()
    turned = _turned(model)
    typical = max(float(each.abs().max()) for each in gradients.values())
    worst = 0.0
    for place, gradient in gradients.items():
        wanted = parameters[place].grad
        assert wanted is not None, place
        gradient = gradient.t() if parameters[place] in turned else gradient
        scale = max(float(wanted.abs().max()), SMALL[torch.float64] * typical)
        worst = max(worst, float((gradient.reshape(wanted.shape) - wanted).abs().max()) / scale)
    expected = float(whole.detach())
    missing = len({id(p) for p in model.parameters() if p.grad is not None} - {id(p) for p in parameters.values()})
    return {
        "loss_off": abs(float(loss) - expected) / abs(expected),
        "gradients_off": worst,
        "gradients": len(gradients),
        "gradients_missing": missing,
    }


def by_rounding(trace: Any) -> float:
    """Return the largest change of a gradient on one device if each number of the input is rounded otherwise."""
    from gpusim.gpu.layerwise.batch import Data, make_data
    from gpusim.gpu.layerwise.check import SMALL
    from gpusim.gpu.layerwise.one_device import run_on_one_device
    from gpusim.layerwise.from_trace import layers_of

    cpu = torch.device("cpu")
    graph = layers_of(trace).for_gpus(GPUS[-1])
    data = make_data(graph, SEED, torch.float64, cpu)
    signs = torch.randint(0, 2, data.inputs.shape, generator=torch.Generator().manual_seed(0)).double() * 2 - 1
    other = Data(data.inputs * (1 + signs * torch.finfo(torch.float64).eps), data.targets)
    (_, one), (_, two) = (
        run_on_one_device(graph, each, dtype=torch.float64, seed=SEED, device=cpu) for each in (data, other)
    )
    typical = max(float(each.abs().max()) for each in one.values())
    return max(
        float((two[name] - each).abs().max()) / max(float(each.abs().max()), SMALL[torch.float64] * typical)
        for name, each in one.items()
    )


def _without_dropout(graph: Any) -> Any:
    layers = tuple(
        replace(x, ops=tuple(replace(op, options={"p": 0.0}) if op.kind == "dropout" else op for op in x.ops))
        for x in graph.layers
    )
    return replace(graph, layers=layers)


def _with_weights(model: nn.Module, trace: Any, graph: Any) -> dict[str, torch.Tensor]:
    """Give torch's module the values of the graph's parameters; returns its parameters by the graph's names."""
    from gpusim.gpu.layerwise.operations import parameters_of
    from gpusim.layerwise.rule import parameters_of as parameters_at

    own = dict(model.named_parameters(remove_duplicate=False))
    turned = _turned(model)
    found: dict[str, torch.Tensor] = {}
    for index, layer in enumerate(graph.layers):
        read = [trace.tensors[w] for op in layer.forward for t in trace.ops[op].reads for w in parameters_at(trace, t)]
        left = {each.name: prod(each.shape) for each in read}
        generator = torch.Generator().manual_seed(SEED * 100_003 + index)
        tied = {(tie.op, tie.name) for tie in layer.tied}
        for number, named in enumerate(parameters_of(layer, generator, torch.float64)):
            for key, value in named.items():
                if (number, key) in tied:
                    continue
                if key not in own:
                    fitting = [n for n, size in left.items() if size == value.numel()]
                    ending = [n for n in fitting if n.rpartition(".")[2] == key]
                    place = (ending or fitting)[0]
                else:
                    place = key
                left.pop(place, None)
                value = value.t() if own[place] in turned else value
                own[place].data = value.reshape(own[place].shape).clone()
                found[f"{layer.name}/{number}/{key}"] = own[place]
        for tie in layer.tied:
            first = graph.layers[tie.layer].name
            found[f"{layer.name}/{tie.op}/{tie.name}"] = found[f"{first}/{tie.layer_op}/{tie.name}"]
    return found


def _turned(model: nn.Module) -> set[torch.Tensor]:
    """Return weights that have their inputs first, as those of GPT-2 in transformers."""
    return {module.weight for module in model.modules() if type(module).__name__ == "Conv1D"}


def plans_of(trace: Any, graph: Any, gpus: int) -> dict[str, tuple[Any, ...]]:
    """Return the plans: fixed ones, the searched one, and one that splits each layer at random, or not at all."""
    from gpusim.formats.hardware import load_hardware
    from gpusim.formats.topology import load_topology
    from gpusim.layerwise.compute import Roofline
    from gpusim.layerwise.configs import REPLICATED, layer_configs
    from gpusim.layerwise.costs import Problem
    from gpusim.layerwise.fixed_plans import FIXED_PLANS
    from gpusim.layerwise.search import search

    hardware = load_hardware("h200")
    problem = Problem(graph, gpus, load_topology("h200"), Roofline(hardware), hardware)
    plans = {"data": FIXED_PLANS["data"](graph, gpus), "owt": FIXED_PLANS["owt"](graph, gpus)}
    plans["layer"] = search(problem).choice
    drawn = random.Random(gpus)
    plans["mixed"] = tuple(
        drawn.choice([c for c in (*layer_configs(x, gpus), REPLICATED) if c.parts > 1 or c.replicated])
        for x in graph.layers
    )
    return plans


def on_ranks(file: str, gpus: int) -> list[dict[str, Any]]:
    """Compare the plans of a captured step with one device, on this rank."""
    import torch.distributed as dist

    from gpusim.errors import GpusimError
    from gpusim.gpu.layerwise.check import compare_plan
    from gpusim.layerwise.from_trace import layers_of
    from gpusim.step import load

    trace = load(file).trace
    graph = layers_of(trace).for_gpus(gpus)
    rows = []
    for name, choice in plans_of(trace, graph, gpus).items():
        row: dict[str, Any] = {"gpus": gpus, "plan": name, "splits": _splits(choice)}
        try:
            compared = compare_plan(graph, choice, gpus, device=torch.device("cpu"), seed=SEED)
        except GpusimError as error:
            rows.append(row | {"refused": str(error)})
            continue
        worst = torch.tensor([compared.loss_difference, compared.gradient_difference, float(not compared.equal)])
        dist.all_reduce(worst, op=dist.ReduceOp.MAX)
        row |= {"loss_off": float(worst[0]), "gradients_off": float(worst[1]), "equal": not bool(worst[2])}
        rows.append(row)
    return rows


def _splits(choice: tuple[Any, ...]) -> dict[str, int]:
    return dict(Counter(str(config) for config in choice).most_common())


def run(name: str, folder: Path) -> dict[str, Any]:
    """Capture a network and run its plans; returns a row."""
    from gpusim.errors import GpusimError
    from gpusim.gpu.layerwise.launch import launch
    from gpusim.layerwise.from_trace import layers_of
    from gpusim.trace.store import write_trace

    row: dict[str, Any] = {"network": name}
    try:
        trace = captured(name)
        graph = layers_of(trace)
    except GpusimError as error:
        return row | {"refused": str(error)}
    row |= {"layers": len(graph), "without_rule": sum(not x.splits for x in graph.layers), "notes": list(graph.notes)}
    obstacles = [f"{x.name}: {x.obstacle}" for x in graph.layers if x.obstacle]
    if obstacles:
        return row | {"refused": obstacles[0], "obstacles": obstacles}
    row["torch"] = against_torch(name, trace)
    file = folder / f"{name}.json.gz"
    write_trace(trace, file)
    row["plans"] = []
    os.environ["PYTHONPATH"] = str(ROOT)
    for gpus in GPUS:
        words = ["--rank", str(file)]
        row["plans"] += json.loads(launch(gpus, "research.prototypes.plans_of_networks", words, timeout_s=900))
    if globals()[name](BATCH)[1].is_floating_point():
        row["by_rounding"] = by_rounding(trace)
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("networks", nargs="*", default=NETWORKS)
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.rank:
        import torch.distributed as dist

        from gpusim.gpu.layerwise.__main__ import join, leave

        join()
        rows = on_ranks(options.rank, dist.get_world_size())
        if dist.get_rank() == 0:
            sys.stdout.write(json.dumps(rows))
        leave(0)
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for name in options.networks:
            begin = time.monotonic()
            row = run(name, Path(folder))
            found.append(row)
            sys.stdout.write(json.dumps(_short(row)) + f" {time.monotonic() - begin:.0f} s\n")
            sys.stdout.flush()
            if options.output:
                options.output.write_text(json.dumps({"rows": found}, indent=1) + "\n")
    return 0


def _short(row: dict[str, Any]) -> dict[str, Any]:
    short = {key: value for key, value in row.items() if key not in ("plans", "obstacles")}
    if "plans" in row:
        short["unequal"] = [(p["gpus"], p["plan"]) for p in row["plans"] if not p.get("equal")]
        short["worst"] = max(p.get("gradients_off", 0) for p in row["plans"])
    if "obstacles" in row:
        short["obstacles"] = len(row["obstacles"])
    return short


if __name__ == "__main__":
    raise SystemExit(main())
