"""How much more than training the largest network a search step costs.

    python -m benchmarks.search [--space autonl] [--res 128] [--batch 512] [--no-graph]

Both on one batch that is already on the device, in one run, interleaved medians; on a GPU with recorded passes
(`loop.graph`).
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from autonl.models import build
from autonl.search.gates import Reached
from autonl.search.space import load_space
from autonl.search.supernet import SuperNet
from autonl.train.graphs import Graphed


def seconds(step: Callable[[], None], device: torch.device, count: int) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(count):
        step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - started) / count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--space", default="autonl")
    parser.add_argument("--res", default="128")
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--no-graph", action="store_true", help="launch by launch, as with loop.graph=false")
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    space = dataclasses.replace(load_space(arguments.space), resolution=arguments.res, classes=100)
    networks = {"train": build(space.spec(space.largest)), "search": SuperNet(space)}
    networks = {name: network.to(device, memory_format=torch.channels_last) for name, network in networks.items()}
    supernet: Any = networks["search"]
    gates = supernet.gates
    gates.mode = "sample"
    graph = device.type == "cuda" and not arguments.no_graph
    models: dict[str, Any] = {name: Graphed(network) if graph else network for name, network in networks.items()}
    optimizers = {name: torch.optim.SGD(network.parameters(), 0.1, 0.9) for name, network in networks.items()}
    images = torch.randn(arguments.batch, 3, *supernet.resolution, device=device)
    images = images.contiguous(memory_format=torch.channels_last)
    labels = torch.randint(100, (arguments.batch,), device=device)
    turn = 0

    def loss_of(name: str) -> torch.Tensor:
        nonlocal turn
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            if name == "train":
                return F.cross_entropy(models[name](images), labels)
            turn += 1
            gates.generator.manual_seed(turn)
            observing = (True,) if turn % 10 == 0 else ()  # as in a search
            task_loss = F.cross_entropy(models[name](images, gates(), *observing), labels)
            return task_loss + 0.1 * supernet.cost(Reached.by(gates.probabilities(), gates.columns)).log().float()

    def step(name: str) -> None:
        loss_of(name).backward()
        optimizers[name].step()
        optimizers[name].zero_grad()
        if name == "search":
            gates.clamp()

    times: dict[str, list[float]] = {name: [] for name in optimizers}
    for name in optimizers:
        seconds(lambda name=name: step(name), device, 5)
    for _ in range(arguments.rounds):
        for name, found in times.items():
            found.append(seconds(lambda name=name: step(name), device, arguments.steps))
    medians = {name: statistics.median(found) for name, found in times.items()}
    where = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    how = "recorded" if graph else "launch by launch"
    print(f"{space.name} at {arguments.res}, batch {arguments.batch}, {where}, torch {torch.__version__}, {how}")
    for name, median in medians.items():
        spread = f"{1e3 * min(times[name]):.1f} to {1e3 * max(times[name]):.1f}"
        print(f"{name:7s} {1e3 * median:8.2f} ms a step ({spread}), {arguments.batch / median:,.0f} images/s")
    print(f"ratio   {medians['search'] / medians['train']:8.3f}")


if __name__ == "__main__":
    main()
