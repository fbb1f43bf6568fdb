"""LightNL in a network of timm's: the outputs stay, a few MACs are added, and it learns in any training loop.

python examples/lightnl_in_timm.py mobilenetv3_large_100
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import timm
import torch
import torch.nn.functional as F

import autonl
from autonl.data.digits import digits
from autonl.profile import profile


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("network", nargs="?", default="mobilenetv3_large_100", help="one with inverted residuals")
    parser.add_argument("--steps", type=int, default=20)
    given = parser.parse_args(arguments)
    torch.manual_seed(0)

    plain, with_lightnl = (profile(f"timm:{given.network}", operator=name) for name in (None, "lightnl"))
    more = 100 * (with_lightnl.macs / plain.macs - 1)
    print(f"{given.network}: {plain.macs / 1e6:.1f}M MACs, with LightNL {with_lightnl.macs / 1e6:.1f}M, {more:+.1f} %")

    model = timm.create_model(given.network, num_classes=10)
    images = torch.randn(2, 3, 64, 64)
    model.eval()
    before = model(images)
    autonl.insert_lightnl(model)  # with pretrained=True a trained network keeps what it knows
    print(f"outputs are the same: {torch.equal(model.eval()(images), before)}")

    stored, _ = digits()
    pixels = F.interpolate(stored.images[::16].float() / 127.5 - 1, 64)  # (N, 3, 64, 64)
    labels = stored.labels[::16]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    model.train()
    for step in range(given.steps):
        chosen = torch.randperm(len(labels))[:32]
        loss = F.cross_entropy(model(pixels[chosen]), labels[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 5 == 0 or step == given.steps - 1:
            print(f"step {step}: loss {loss.item():.3f}")
    blocks = [module for module in model.modules() if isinstance(module, autonl.LightNL)]
    opened = sum(bool(block.bn.weight.abs().max() > 0) for block in blocks)
    print(f"{opened} of {len(blocks)} LightNL blocks have begun to act")


if __name__ == "__main__":
    main()
