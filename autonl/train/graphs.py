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

    Arguments that are no tensors come last and have a recording each. What is no such call goes the plain way:
    evaluation, another batch size. A replay writes its results where the last one did: gradients have to be used
    before the next backward pass, an output before the next forward pass.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.recordings: dict[tuple[Any, ...], Any] = {}
        self.shapes: list[torch.Size] = []
        self.memory: Any = None  # one for all recordings: no two are on the way at once

    def forward(self, *inputs: Any) -> Any:
        tensors = tuple(value for value in inputs if isinstance(value, Tensor))
        shapes, constants = [value.shape for value in tensors], inputs[len(tensors) :]
        if not (self.training and torch.is_grad_enabled() and shapes == (self.shapes or shapes)):
            return self.module(*inputs)
        if constants not in self.recordings:
            self.shapes, self.memory = shapes, self.memory or torch.cuda.graph_pool_handle()
            self.recordings[constants] = record(self.module, tensors, constants, self.memory)
        return self.recordings[constants](*tensors)


class Bound(nn.Module):
    """A module with some arguments settled. Its own `forward` stays what it is: recording replaces this one's."""

    def __init__(self, module: nn.Module, constants: tuple[Any, ...]) -> None:
        super().__init__()
        self.module, self.constants = module, constants

    def forward(self, *inputs: Tensor) -> Any:
        return self.module(*inputs, *self.constants)


def record(module: nn.Module, inputs: tuple[Tensor, ...], constants: tuple[Any, ...], memory: Any) -> Any:
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
            recorded = torch.cuda.make_graphed_callables(
                Bound(module, constants).train(), samples, allow_unused_input=True, pool=memory
            )
    except RuntimeError as error:
        reason = " ".join(str(error).split())[:200]
        raise AutoNLError(f"{type(module).__name__} cannot be recorded: {reason}; allowed: loop.graph=false") from error
    for buffer, value in zip(module.buffers(), state, strict=True):
        buffer.data.copy_(value)  # `data`: a backward pass that needs the buffer would refuse a change
    return recorded
