"""Train a small network with the optimized step and eagerly, and plot both loss curves. Needs torch and plotly."""

import copy
import warnings

import plotly.graph_objects as go
import torch
from torch import nn

import gpusim

POINTS, STEPS, BATCH = 1024, 200, 64


class Spirals(nn.Module):
    """Three branches, concatenated: parallel work for streams."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(
            nn.Sequential(nn.Linear(2, width), nn.BatchNorm1d(width), nn.Tanh(), nn.Linear(width, 16))
            for width in (16, 32, 64)
        )
        self.head = nn.Sequential(nn.Tanh(), nn.Dropout(0.1), nn.Linear(48, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.cat([branch(x) for branch in self.branches], 1))


def train(step) -> list[float]:
    """Return the loss of each step; every `step` gets the same batches and random numbers."""
    torch.manual_seed(1)
    batches = torch.randint(0, POINTS, (STEPS, BATCH))
    return torch.stack([step(points[batch], labels[batch]) for batch in batches]).tolist()


def eager(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    optimizers[0].zero_grad()
    loss = nn.functional.cross_entropy(models[0](x), y)
    loss.backward()
    optimizers[0].step()
    return loss.detach()


warnings.simplefilter("ignore")  # without a GPU gpusim warns, and the step runs as it is
torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
labels = torch.arange(POINTS, device=device) % 2
turn = torch.rand(POINTS, device=device) * 4 + 1
points = torch.stack([turn * (turn + labels * torch.pi).cos(), turn * (turn + labels * torch.pi).sin()], 1) / 5
models = [Spirals().to(device)]
models.append(copy.deepcopy(models[0]))
optimizers = [torch.optim.Adam(model.parameters(), lr=0.02) for model in models]
example = (points[:BATCH], labels[:BATCH])
fast = gpusim.optimize(models[1], example, loss=nn.functional.cross_entropy, optimizer=optimizers[1])
curves = {"eager": train(eager), "optimized": train(fast)}
apart = max(abs(one - other) for one, other in zip(*curves.values(), strict=True))
print(f"loss {curves['eager'][0]:.3f} -> {curves['eager'][-1]:.3f}, the curves at most {apart:.1e} apart")
figure = go.Figure([go.Scatter(y=losses, name=name) for name, losses in curves.items()])
figure.update_layout(xaxis_title="step", yaxis_title="loss").write_html("train_faster.html", include_plotlyjs="cdn")
