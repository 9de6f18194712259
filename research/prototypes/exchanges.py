"""Times in us of exchanges and sums of AlexNet's plans in CUDA graphs, by NCCL and by memory that all GPUs can read.

    torchrun --nproc-per-node 2 research/prototypes/exchanges.py nccl|pool|symm|shares OUT.json

`nccl` has collectives, and pieces sent one by one; `pool` collectives of memory that is registered with NCCL; `symm`
kernels that read the other GPUs' memory; `shares` the gradients of AlexNet's convolutions and of linear layers, each by
itself. A time is the slowest rank's median of one of 20 in a row.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn import functional

BATCH, CALLS, ROUNDS = 32, 20, 15
#: Features of the inputs of the fully connected layers.
FEATURES = {"fc1": 9216, "fc2": 4096, "fc3": 1000}
#: Weights of all convolutions, of the first two, and of the first.
SUMS = {"conv": 2469696, "conv12": 330688, "conv1": 23296}
#: Name, channels before and after, kernel, stride, padding, size of the input.
CONVOLUTIONS = (
    ("conv1", 3, 64, 11, 4, 2, 224),
    ("conv2", 64, 192, 5, 1, 2, 27),
    ("conv3", 192, 384, 3, 1, 1, 13),
    ("conv4", 384, 256, 3, 1, 1, 13),
    ("conv5", 256, 256, 3, 1, 1, 13),
)
LINEARS = ((128, 9216, 1024), (64, 9216, 2048), (128, 4096, 4096), (64, 4096, 4096), (128, 4096, 1024))


class Times:
    """Times of calls that all ranks make, written as they come."""

    def __init__(self, file: Path, device: torch.device) -> None:
        self.file, self.device, self.found = file, device, dict[str, float]()

    def note(self, name: str, run: Callable[[], object]) -> None:
        """Time one call in a graph of several."""
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(3):
                run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            for _ in range(CALLS):
                run()
        samples = []
        for _ in range(ROUNDS):
            dist.barrier()
            torch.cuda.synchronize()
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            samples.append(begin.elapsed_time(end) * 1e3 / CALLS)
        slowest = torch.tensor(sorted(samples)[ROUNDS // 2], device=self.device)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        self.found[name] = round(float(slowest), 2)
        if dist.get_rank() == 0:
            self.file.write_text(json.dumps(self.found, indent=1) + "\n")


def sent(sends: list[tuple[int, torch.Tensor]], receives: list[tuple[int, torch.Tensor]]) -> None:
    """Send and receive pieces."""
    operations = [dist.P2POp(dist.isend, tensor, peer) for peer, tensor in sends]
    operations += [dist.P2POp(dist.irecv, tensor, peer) for peer, tensor in receives]
    for work in dist.batch_isend_irecv(operations):
        work.wait()


def nccl(times: Times, rank: int, gpus: int, device: torch.device) -> None:
    """Collectives and pieces."""
    others = [peer for peer in range(gpus) if peer != rank]
    for name, features in FEATURES.items():
        whole = torch.randn(BATCH * gpus * features, device=device)
        own, pieces = torch.randn(BATCH * features, device=device), list(whole.chunk(gpus))
        received = [torch.empty_like(own) for _ in range(gpus)]
        size = whole.nbytes
        times.note(f"all_gather {name} {size}", lambda a=whole, b=own: dist.all_gather_into_tensor(a, b))
        times.note(f"reduce_scatter {name} {size}", lambda a=whole, b=own: dist.reduce_scatter_tensor(b, a))
        sends, receives = [(peer, own) for peer in others], [(peer, pieces[peer]) for peer in others]
        times.note(f"p2p gather {name}", lambda a=sends, b=receives: sent(a, b))
        back = [(peer, received[peer]) for peer in others]
        times.note(f"p2p scatter {name}", lambda a=receives, b=back: sent(a, b))
        to_one = ([], receives) if rank == 0 else ([(0, own)], [])
        times.note(f"p2p to one {name}", lambda pair=to_one: sent(*pair))
    for name, elements in SUMS.items():
        gradient = torch.randn(elements, device=device)
        times.note(f"all_reduce {name} {gradient.nbytes}", lambda a=gradient: dist.all_reduce(a))
    for kib in (1, 16, 64, 256, 1024, 2048, 4096, 8192, 25600):
        gradient = torch.randn(kib * 256, device=device)
        times.note(f"all_reduce {kib} KiB", lambda a=gradient: dist.all_reduce(a))


def pool(times: Times, gpus: int, device: torch.device) -> None:
    """Collectives of registered memory."""
    backend = dist.group.WORLD._get_backend(device)
    memory = torch.cuda.MemPool(backend.mem_allocator)
    with torch.cuda.use_mem_pool(memory):
        sizes = {name: BATCH * gpus * features for name, features in FEATURES.items()}
        made = {n: (torch.zeros(s, device=device), torch.zeros(s // gpus, device=device)) for n, s in sizes.items()}
        sums = {name: torch.zeros(elements, device=device) for name, elements in SUMS.items()}
    backend.register_mem_pool(memory, symm=True)
    for name, (whole, own) in made.items():
        times.note(f"symmetric all_gather {name}", lambda a=whole, b=own: dist.all_gather_into_tensor(a, b))
        times.note(f"symmetric reduce_scatter {name}", lambda a=whole, b=own: dist.reduce_scatter_tensor(b, a))
    for name, gradient in sums.items():
        times.note(f"symmetric all_reduce {name}", lambda a=gradient: dist.all_reduce(a))


def symm(times: Times, rank: int, gpus: int, device: torch.device) -> None:
    """A sum of parts that kernels read from the other GPUs."""
    from torch.distributed import _symmetric_memory as symmetric

    elements = BATCH * gpus * FEATURES["fc1"]
    mine = symmetric.empty(elements, dtype=torch.float32, device=device)
    shared = symmetric.rendezvous(mine, dist.group.WORLD)
    part = elements // gpus
    places = [shared.get_buffer(peer, (elements,), torch.float32)[rank * part :][:part] for peer in range(gpus)]
    own, places = places[rank], [place for peer, place in enumerate(places) if peer != rank]

    def scatter() -> None:
        shared.barrier(channel=0)
        total = own
        for place in places:
            total = total + place
        shared.barrier(channel=0)

    times.note("symm barrier fc1", lambda: shared.barrier(channel=0))
    times.note("symm reduce_scatter fc1", scatter)


def shares(times: Times, device: torch.device) -> None:
    """Gradients, each by itself, without and with cuDNN's benchmark of algorithms."""
    for benchmark in (False, True):
        torch.backends.cudnn.benchmark = benchmark
        for name, before, after, kernel, stride, padding, size in CONVOLUTIONS:
            x = torch.randn(BATCH, before, size, size, device=device)
            w = torch.randn(after, before, kernel, kernel, device=device)
            same = [stride] * 2, [padding] * 2, [1, 1], False, [0, 0], 1
            g = torch.randn_like(functional.conv2d(x, w, None, stride, padding))
            masks = {"weight": (False, True, False), "bias": (False, False, True)}
            masks |= {"input": (True, False, False)} if name != "conv1" else {}
            for what, mask in (masks | {"all": (name != "conv1", True, True)}).items():
                passed = g, x, w, [after], *same, list(mask)
                run = torch.ops.aten.convolution_backward
                times.note(f"{name} benchmark={benchmark} {what}", lambda run=run, passed=passed: run(*passed))
    for n, before, after in LINEARS:
        x, w = torch.randn(n, before, device=device), torch.randn(after, before, device=device)
        g, b = torch.randn(n, after, device=device), torch.randn(after, device=device)
        label = f"linear {n}x{before}x{after}"
        times.note(f"{label} forward", lambda x=x, w=w, b=b: functional.linear(x, w, b))
        times.note(f"{label} input", lambda g=g, w=w: g @ w)
        times.note(f"{label} weight", lambda g=g, x=x: g.t() @ x)
        times.note(f"{label} bias", lambda g=g: g.sum(0))


def main() -> None:
    """Run one part."""
    part, file = sys.argv[1], Path(sys.argv[2])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    times, rank, gpus = Times(file, device), dist.get_rank(), dist.get_world_size()
    if part == "nccl":
        nccl(times, rank, gpus, device)
    elif part == "pool":
        pool(times, gpus, device)
    elif part == "symm":
        symm(times, rank, gpus, device)
    else:
        shares(times, device)
    torch.cuda.synchronize()
    os._exit(0)  # NCCL's threads may hold graphs that are gone


if __name__ == "__main__":
    main()
