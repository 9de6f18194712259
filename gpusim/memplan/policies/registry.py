"""The memory policies by name, with their properties for commands."""

from __future__ import annotations

from dataclasses import dataclass

from gpusim.errors import UnknownNameError
from gpusim.memplan.plan import MemoryPlan
from gpusim.memplan.policies.base import MemoryPolicy, Setting
from gpusim.memplan.policies.caffe import caffe
from gpusim.memplan.policies.capuchin import capuchin
from gpusim.memplan.policies.checkpoint import checkpoint
from gpusim.memplan.policies.keep_all import keep_all
from gpusim.memplan.policies.layrub import layrub, layrub_inter, layrub_intra
from gpusim.memplan.policies.layup import layup
from gpusim.memplan.policies.least_time import least_time
from gpusim.memplan.policies.olla import olla
from gpusim.memplan.policies.superneurons import superneurons, superneurons_release
from gpusim.memplan.policies.torch_budget import torch_budget
from gpusim.memplan.policies.torch_offload import torch_offload
from gpusim.memplan.policies.vdnn import vdnn_all, vdnn_all_m, vdnn_conv, vdnn_conv_m, vdnn_dyn


@dataclass(frozen=True, slots=True)
class RegisteredMemoryPolicy:
    """A memory policy with its name; calling it makes a plan."""

    name: str
    make: MemoryPolicy
    source: str
    """System and year, as cited in docs/commands/memory.md."""
    summary: str
    """One-sentence description."""
    takes_budget: bool = False
    """Whether its plan depends on a byte budget."""

    def __call__(self, setting: Setting) -> MemoryPlan:
        """Make a plan under the policy's name."""
        return self.make(setting).made(self.name)


MEMORY_POLICIES: dict[str, RegisteredMemoryPolicy] = {
    policy.name: policy
    for policy in (
        RegisteredMemoryPolicy("keep_all", keep_all, "PyTorch", "All that the backward pass needs stays."),
        RegisteredMemoryPolicy("caffe", caffe, "Caffe, 2014", "Every activation and its gradient stay to the end."),
        RegisteredMemoryPolicy(
            "vdnn_all", vdnn_all, "vDNN, 2016", "The input of each layer moves to the host while that layer runs."
        ),
        RegisteredMemoryPolicy(
            "vdnn_all_m",
            vdnn_all_m,
            "vDNN, 2016",
            "As vdnn_all, with the algorithms of least workspace.",
        ),
        RegisteredMemoryPolicy("vdnn_conv", vdnn_conv, "vDNN, 2016", "The inputs of convolutions move."),
        RegisteredMemoryPolicy(
            "vdnn_conv_m", vdnn_conv_m, "vDNN, 2016", "As vdnn_conv, with the algorithms of least workspace."
        ),
        RegisteredMemoryPolicy(
            "vdnn_dyn",
            vdnn_dyn,
            "vDNN, 2016",
            "The first of nothing, vdnn_conv, vdnn_all that fits, then with smaller workspaces.",
            takes_budget=True,
        ),
        RegisteredMemoryPolicy(
            "layrub_intra", layrub_intra, "Layrub, 2018", "Gradients take the memory of activations."
        ),
        RegisteredMemoryPolicy(
            "layrub_inter", layrub_inter, "Layrub, 2018", "Inputs of layers move, and come back one layer ahead."
        ),
        RegisteredMemoryPolicy("layrub", layrub, "Layrub, 2018", "Both of these."),
        RegisteredMemoryPolicy(
            "checkpoint", checkpoint, "Chen et al., 2016", "The root of n checkpoints, segments between again."
        ),
        RegisteredMemoryPolicy(
            "superneurons",
            superneurons,
            "SuperNeurons, 2018",
            "Results of convolutions move, what lies between is computed again.",
        ),
        RegisteredMemoryPolicy(
            "superneurons_release",
            superneurons_release,
            "SuperNeurons, released code",
            "The least recently used move, and ops wait for each copy.",
            takes_budget=True,
        ),
        RegisteredMemoryPolicy(
            "layup", layup, "Layup, 2019 (interpreted)", "Each type of layer moves or computes again."
        ),
        RegisteredMemoryPolicy(
            "capuchin", capuchin, "Capuchin, 2020", "Swap what can be hidden, then recompute.", takes_budget=True
        ),
        RegisteredMemoryPolicy("olla", olla, "OLLA, 2022", "Another order of ops, nothing else."),
        RegisteredMemoryPolicy(
            "torch_budget",
            torch_budget,
            "PyTorch's activation memory budget",
            "A knapsack of what stays, the rest is computed again.",
            takes_budget=True,
        ),
        RegisteredMemoryPolicy(
            "torch_offload", torch_offload, "PyTorch's activation offloading", "All that is saved moves."
        ),
        RegisteredMemoryPolicy(
            "least_time",
            least_time,
            "gpusim",
            "The least predicted time for a byte budget: keep, move or compute again.",
            takes_budget=True,
        ),
    )
}


def memory_policy_by_name(name: str) -> RegisteredMemoryPolicy:
    """Return a memory policy. Raises `UnknownNameError` with the nearest name."""
    if name not in MEMORY_POLICIES:
        raise UnknownNameError("memory policy", name, MEMORY_POLICIES)
    return MEMORY_POLICIES[name]
