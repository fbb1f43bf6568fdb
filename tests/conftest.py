"""Two sizes of proof: `make test` runs small numbers, `make prove` (AUTONL_PROVE=1) large ones of the same tests."""

import os
from pathlib import Path
from typing import TypeVar

import pytest
import torch
from hypothesis import settings

# Virtual machines announce AMX and then refuse its instructions (SIGILL in a bf16 product): oneDNN goes without.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")

# Tracing on fake tensors (torch.export, torch.compile) pretends that there is a CUDA device; a first backward after it
# starts autograd's threads for that device, and no forked child can train any more. A backward before it starts none.
torch.ones(1, requires_grad=True).sum().backward()

PROVE = os.environ.get("AUTONL_PROVE") == "1"
SHARED_DATA = Path(__file__).parents[2] / "shared" / "data"  # real images and weights, beside the checkout

Number = TypeVar("Number")


def prove(small: Number, large: Number) -> Number:
    """How much of a proof to run."""
    return large if PROVE else small


def shared_data(name: str) -> Path:
    """A file of real images or weights; the test is skipped where there is none."""
    if not (SHARED_DATA / name).exists():
        pytest.skip(f"needs {name} in ../shared/data, which is not part of the repository")
    return SHARED_DATA / name


# `make test` draws the same examples every time; `make prove` looks for new ones. No time limits in tests.
settings.register_profile("autonl", deadline=None, derandomize=not PROVE, print_blob=PROVE)
settings.load_profile("autonl")
torch.set_num_threads(1)
