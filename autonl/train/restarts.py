"""A process group for `torchrun --max-restarts`."""

from __future__ import annotations

import atexit
import os

import torch.distributed as dist


def join_attempt(backend: str) -> None:
    """Join the processes of this attempt, as Fabric would, but under keys of their own.

    torchrun keeps its key-value store through a restart: under the same keys, new processes would find the
    addresses of the dead ones and wait for them (torch 2.15).
    """
    store, rank, world = next(dist.rendezvous("env://"))
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    dist.init_process_group(backend, store=dist.PrefixStore(f"attempt {attempt}", store), rank=rank, world_size=world)
    atexit.register(dist.destroy_process_group)
