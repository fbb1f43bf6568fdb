"""BN statistics taken anew from training batches, for weights that were averaged or changed since."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from timm.utils import distribute_bn
from torch import nn
from torch.optim.swa_utils import update_bn

from autonl.data.memory import Batch


@torch.no_grad()
def calibrate_bn(module: nn.Module, batches: Iterable[Batch], world: int = 1) -> None:
    """Replace the running statistics of every BN by the plain mean over the batches, and over the processes."""
    update_bn(batches, module)
    if world > 1:
        distribute_bn(module, world, reduce=True)


@torch.no_grad()
def share_bn(module: nn.Module, world: int) -> None:
    """Give all processes the running statistics of the first one, which a checkpoint holds.

    With SyncBatchNorm they are the same everywhere; without it, each process has seen its own images.
    """
    if world > 1:
        distribute_bn(module, world, reduce=False)
