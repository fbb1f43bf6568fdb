"""Forward and backward passes recorded once as CUDA graphs: for small images, where launching costs more than work."""

from __future__ import annotations

import gc
import warnings
from typing import Any

import torch
from lightning.fabric import Fabric
from torch import Tensor, nn

from autonl.data.loaders import TrainingBatches
from autonl.data.memory import MemoryTraining
from autonl.errors import AutoNLError
from autonl.train.config import LoopConfig


def can_be_recorded(fabric: Fabric, train: TrainingBatches, config: LoopConfig) -> bool:
    """On one GPU, with images in memory: processes exchange gradients on the way, a loader's threads disturb.

    Not with accumulated gradients, which a replay would overwrite, nor what torch.compile has made.
    """
    alone = fabric.device.type == "cuda" and fabric.world_size == 1
    return alone and isinstance(train, MemoryTraining) and config.accumulate == 1 and not config.compile


class Graphed(nn.Module):
    """The module's passes in training, recorded at the first call and replayed from then on, dropout drawn anew.

    What is no such call goes the plain way: evaluation, arguments that are no tensors, another batch size.
    A replay writes its gradients where the last one did: they have to be used before the next backward pass.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.recorded: Any = None
        self.shapes: list[torch.Size] = []

    def forward(self, *inputs: Any) -> Any:
        if not (self.training and torch.is_grad_enabled() and all(isinstance(value, Tensor) for value in inputs)):
            return self.module(*inputs)
        shapes = [value.shape for value in inputs]
        if self.recorded is None:
            self.recorded, self.shapes = record(self.module, inputs), shapes
        return (self.recorded if shapes == self.shapes else self.module)(*inputs)


class Alone(nn.Module):
    """Stands before a module whose own `forward` must stay what it is: recording replaces it."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *inputs: Tensor) -> Any:
        return self.module(*inputs)


def record(module: nn.Module, inputs: tuple[Tensor, ...]) -> Any:
    """A callable in place of the module, for inputs of these shapes. The module's state is left as it was."""
    samples = tuple(value.detach().clone().requires_grad_(value.requires_grad) for value in inputs)
    state = [buffer.clone() for buffer in module.buffers()]  # recording begins with three passes for real
    precision = torch.autocast(
        "cuda", torch.get_autocast_dtype("cuda"), torch.is_autocast_enabled("cuda"), cache_enabled=False
    )
    gc.collect()  # another recording that is thrown away meanwhile would break this one
    try:
        with torch.random.fork_rng([samples[0].device]), precision, warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The AccumulateGrad node's stream")  # of torch's own warm-up
            recorded = torch.cuda.make_graphed_callables(Alone(module).train(), samples, allow_unused_input=True)
    except RuntimeError as error:
        reason = " ".join(str(error).split())[:200]
        raise AutoNLError(f"{type(module).__name__} cannot be recorded: {reason}; allowed: loop.graph=false") from error
    for buffer, value in zip(module.buffers(), state, strict=True):
        buffer.data.copy_(value)  # `data`: a backward pass that needs the buffer would refuse a change
    return recorded
