"""Forward and backward passes recorded once as CUDA graphs: for small images, where launching costs more than work."""

from __future__ import annotations

import gc
import itertools
import warnings
from typing import Any

import torch
from lightning.fabric import Fabric
from torch import Tensor, nn

from autonl.data.loaders import TrainingBatches
from autonl.data.masks import MemoryMaskTraining
from autonl.data.memory import MemoryTraining
from autonl.errors import AutoNLError
from autonl.train.config import LoopConfig
from autonl.train.tasks import Task


def can_be_recorded(fabric: Fabric, task: Task, train: TrainingBatches, config: LoopConfig) -> bool:
    """On one GPU, with images in memory: processes exchange gradients on the way, a loader's threads disturb.

    Not with accumulated gradients, which a replay would overwrite, nor what torch.compile has made.
    """
    alone = fabric.device.type == "cuda" and fabric.world_size == 1
    plain = config.accumulate == 1 and not config.compile
    in_memory = isinstance(train, MemoryTraining | MemoryMaskTraining)
    return config.graph and task.recorded and alone and plain and in_memory


class Graphed(nn.Module):
    """The module's passes in training, recorded at the first call and replayed from then on, dropout drawn anew.

    Arguments that are no tensors come last and have a recording each. What is no such call goes the plain way:
    evaluation, another batch size, arguments by name. A replay does again what was recorded and writes its results
    where the last one did: whatever else the module reads must not change, and the backward pass, the step and all that
    looks at the output have to come before the next call.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.recordings: dict[tuple[Any, ...], Any] = {}
        self.shapes: list[torch.Size] = []
        self.memory: Any = None  # one for all recordings: no two are on the way at once

    def __getattr__(self, name: str) -> Any:
        """The module's attributes, as Fabric's own wrapper gives them."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)

    def forward(self, *inputs: Any, **named: Any) -> Any:
        tensors = tuple(itertools.takewhile(lambda value: isinstance(value, Tensor), inputs))
        shapes, constants = [value.shape for value in tensors], inputs[len(tensors) :]
        unusual = named or any(isinstance(value, Tensor) for value in constants) or shapes != (self.shapes or shapes)
        if unusual or not self.training or not torch.is_grad_enabled():
            return self.module(*inputs, **named)
        if constants not in self.recordings:
            self.shapes, self.memory = shapes, self.memory or torch.cuda.graph_pool_handle()
            self.recordings[constants] = record(self.module, tensors, constants, self.memory)
        return self.recordings[constants](*tensors)

    def release(self) -> None:
        """Give the memory of the recordings back; a later call would record anew."""
        self.recordings, self.memory = {}, None
        gc.collect()  # torch 2.11's refer to themselves


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
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        reason = " ".join(str(error).split())[:200]
        raise AutoNLError(f"{type(module).__name__} cannot be recorded: {reason}; allowed: loop.graph=false") from error
    for buffer, value in zip(module.buffers(), state, strict=True):
        buffer.data.copy_(value)  # `data`: a backward pass that needs the buffer would refuse a change
    return recorded
