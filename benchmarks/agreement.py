"""Do kernels compute what the plain path does, on the features of a network in training? On a CUDA GPU:

    python ../shared/data/unpack.py tiny_imagenet100 DIR
    python -m benchmarks.agreement autonl_l --data DIR [--steps 50 150 300] [--out benchmarks/results]

The network is trained in bf16 by the recipe tiny_imagenet and the plain path. After each number of steps it is held
against itself: one step in bf16 without kernels, with LightNL's and with those of all layers against the same step in
float32 (`agreement_networks.csv`: the loss, and the norm-wise error of all gradients together), and every LightNL
block, with the features and slopes that it had in that step, against float64 (`agreement_blocks.csv`: errors of z image
by image, those of gradients norm-wise, and how large the features are). At birth LightNL is the identity: at step 0
its depthwise kernel has no gradient to be away from, nan.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from autonl.data.loaders import Loaders, view_of
from autonl.data.memory import Batch
from autonl.data.sources import open_source
from autonl.models import create_model
from autonl.nn.kernels.layers import use_kernels, use_lightnl_kernels
from autonl.nn.light_nonlocal import LightNL
from autonl.train.config import Config, load_config
from autonl.train.tasks import Classification
from benchmarks import RESULTS, require_cuda, write_rows

FORMS: dict[str, Callable[[nn.Module], None]] = {
    "plain": lambda network: None,
    "kernels": use_lightnl_kernels,
    "layers": use_kernels,
}


def without_chance(network: nn.Module) -> nn.Module:
    """A copy without dropout, of which no two forms would drop the same."""
    network = copy.deepcopy(network).train()
    for layer in network.modules():
        for name in ("drop_rate", "drop_prob", "p"):
            if isinstance(getattr(layer, name, None), float):
                setattr(layer, name, 0.0)
    return network


def gradients(network: nn.Module, batch: Batch, dtype: torch.dtype) -> tuple[float, Tensor]:
    """The loss, and all gradients behind each other."""
    images, labels = batch
    with torch.autocast("cuda", torch.bfloat16, enabled=dtype == torch.bfloat16):
        logits = network(images)
    loss = cross_entropy(logits.float(), labels, label_smoothing=0.1)
    loss.backward()
    return loss.item(), torch.cat([p.grad.flatten() for p in network.parameters() if p.grad is not None])


def distance(value: Tensor, exact: Tensor) -> float:
    return ((value.double() - exact.double()).norm() / exact.double().norm()).item()


def compare_networks(network: nn.Module, batch: Batch) -> Iterator[dict[str, Any]]:
    exact_loss, exact = gradients(without_chance(network), batch, torch.float32)
    for form, change in FORMS.items():
        changed = without_chance(network)
        change(changed)
        loss, found = gradients(changed, batch, torch.bfloat16)
        yield {"form": form, "loss": loss, "exact_loss": exact_loss, "gradients": distance(found, exact)}


def features(network: nn.Module, batch: Batch) -> dict[str, tuple[Tensor, Tensor]]:
    """What each LightNL block takes in a step in bf16 without kernels, and the slope at what it gives."""
    network, found = without_chance(network), {}

    def note(name: str) -> Callable[..., None]:
        def hook(block: nn.Module, inputs: tuple[Tensor], z: Tensor) -> None:
            z.register_hook(lambda slope: found.update({name: (inputs[0].detach(), slope.detach())}))

        return hook

    for name, block in network.named_modules():
        if isinstance(block, LightNL):
            block.register_forward_hook(note(name))
    gradients(network, batch, torch.bfloat16)
    return found


def block_step(block: LightNL, x: Tensor, slope: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    block, x = block.to(dtype), x.detach().to(dtype if dtype == torch.float64 else x.dtype).requires_grad_()
    with torch.autocast("cuda", torch.bfloat16, enabled=dtype == torch.float32):
        z = block(x)
    z.backward(slope.to(z.dtype))
    return {"z": z.detach(), "dx": x.grad} | {n.replace(".", "_"): p.grad for n, p in block.named_parameters()}


def compare_blocks(network: nn.Module, batch: Batch) -> Iterator[dict[str, Any]]:
    blocks = dict(network.named_modules())
    for name, (x, slope) in features(network, batch).items():
        exact, fused, plain = (copy.deepcopy(blocks[name]).train() for _ in range(3))
        fused.fused = True
        expected = block_step(exact, x, slope, torch.float64)
        rms, largest = x.float().square().mean().sqrt().item(), x.abs().max().item()
        row: dict[str, Any] = {"block": name, "rms": rms, "largest": largest}
        for form, block in (("plain", plain), ("kernels", fused)):
            found = block_step(block, x, slope, torch.float32)
            away = (found["z"].double() - expected["z"]).flatten(1).norm(dim=1)
            errors = away / expected["z"].flatten(1).norm(dim=1).clamp_min(1e-30)  # image by image
            row |= {f"{form}_z_median": errors.median().item(), f"{form}_z_worst": errors.max().item()}
            row |= {f"{form}_{key}": distance(found[key], expected[key]) for key in expected}
        yield {key: float(f"{value:.4g}") if isinstance(value, float) else value for key, value in row.items()}


def training(config: Config, network: nn.Module) -> tuple[Iterator[Batch], Callable[[Batch], None]]:
    """Batches, and what trains the network on one."""
    loaders = Loaders(config.data, config.augment, view_of(network, config.data), 100, torch.device("cuda"))
    batches = loaders.training(open_source(config.data).train)
    task = Classification(100, config.optim, config.schedule)
    [(optimizer, schedule)] = task.tunings(network, len(batches))
    done = 0

    def step(batch: Batch) -> None:
        nonlocal done
        with torch.autocast("cuda", torch.bfloat16):
            loss = task.step(network, batch, done)["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        done += 1
        if schedule:
            schedule.step_update(done)

    return (batch for epoch in range(config.schedule.epochs) for batch in batches.epoch(epoch)), step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("network")
    parser.add_argument("--data", required=True)
    parser.add_argument("--steps", type=int, nargs="+", default=[50, 150, 300])
    parser.add_argument("--set", action="append", default=[], dest="settings")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    require_cuda()
    torch.backends.cudnn.allow_tf32 = False  # float32 is what the others are held against
    torch.manual_seed(0)
    settings = [f"data.path={arguments.data}", "data.image_size=96", "schedule.epochs=10", *arguments.settings]
    config = load_config("tiny_imagenet", settings)
    network = create_model(arguments.network, num_classes=100).cuda().to(memory_format=torch.channels_last).train()
    batches, step = training(config, network)
    networks: list[dict[str, Any]] = []
    blocks: list[dict[str, Any]] = []
    known = {"network": arguments.network}
    for done, batch in enumerate(batches):
        if done in arguments.steps:
            networks += [known | {"step": done} | row for row in compare_networks(network, batch)]
            blocks += [known | {"step": done} | row for row in compare_blocks(network, batch)]
            for row in (*networks[-len(FORMS) :], *(row for row in blocks if row["step"] == done)):
                print(*row.values(), flush=True)
            write_rows("agreement_networks", networks, arguments.out)
            write_rows("agreement_blocks", blocks, arguments.out)
        if done >= max(arguments.steps):
            break
        step(batch)


if __name__ == "__main__":
    main()
