"""ExecuTorch, with XNNPACK as its delegate."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from autonl.export.formats import Format
from autonl.export.script import Runner

LARGEST_BATCH = 32  # memory is planned for it


def write(model: nn.Module, image: torch.Tensor, path: Path, dynamic_batch: bool) -> None:
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.exir import to_edge_transform_and_lower

    if dynamic_batch:
        image = image.repeat(2, 1, 1, 1)
    shapes = ({0: torch.export.Dim("batch", min=1, max=LARGEST_BATCH)},) if dynamic_batch else None
    with torch.no_grad():
        program = torch.export.export(model, (image,), dynamic_shapes=shapes)
        lowered = to_edge_transform_and_lower(program, partitioner=[XnnpackPartitioner()])
        path.write_bytes(lowered.to_executorch().buffer)


class RunningExecuTorch:
    def __init__(self, path: Path, threads: int) -> None:
        with quiet():
            from executorch.extension.pybindings import portable_lib
            from executorch.runtime import Runtime

            portable_lib._unsafe_reset_threadpool(threads)
            self.program = Runtime.get().load_program(str(path))
            self.method: Any = self.program.load_method("forward")
        self.outside = operators_outside(path)

    def __call__(self, images: np.ndarray) -> np.ndarray:
        (logits,) = self.method.execute([torch.from_numpy(images)])
        return np.asarray(logits.numpy()).copy()


def operators_outside(path: Path) -> list[str]:
    """The operators that ExecuTorch runs one by one, with its portable kernels."""
    from executorch.exir._serialize._program import deserialize_pte_binary

    program = deserialize_pte_binary(path.read_bytes()).program
    return sorted(operator.name.removeprefix("aten::") for operator in program.execution_plan[0].operators)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without what the C++ part writes to standard error when it looks at the CPU."""
    sys.stderr.flush()
    logging.getLogger("executorch").setLevel(logging.ERROR)
    kept, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(null, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(null)


RUNNER = Runner(
    "executorch, torch, numpy and pillow",
    "import torch\nfrom executorch.runtime import Runtime",
    'method = Runtime.get().load_program(FILE).load_method("forward")',
    "logits = method.execute([torch.from_numpy(image)])[0][0].numpy()",
)

FORMAT = Format(
    name="executorch",
    runtime="executorch",
    suffix=".pte",
    layout="channels_first",
    packages=("executorch",),
    write=write,
    start=RunningExecuTorch,
    runner=RUNNER,
)
