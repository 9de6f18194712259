"""Capture a model of your own, find a schedule, and prove it on this machine's GPU. Needs torch and a GPU."""

import torch

import gpusim


class Branches(torch.nn.Module):
    """Eight independent branches: parallel work for streams."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = torch.nn.ModuleList(torch.nn.Linear(256, 256) for _ in range(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([branch(x).relu() for branch in self.branches]).sum(0)


device = "cuda" if torch.cuda.is_available() else "cpu"
model = Branches().to(device)
inputs, targets = torch.randn(2, 16, 256, device=device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
try:
    step = gpusim.capture(model, (inputs,), targets=(targets,), loss=torch.nn.functional.mse_loss, optimizer=optimizer)
    best = gpusim.explore(step)
    print(best)
    print(gpusim.replay(step, best.schedule))
except gpusim.GpuError as error:
    print(f"skipped: {error}")
