"""Milliseconds of networks in a runtime, on this machine."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autonl.errors import AutoNLError, refuse, refuse_name
from autonl.export.custom_op import has_custom_op, has_lightnl
from autonl.export.deploy import deploy
from autonl.export.formats import RUNTIMES as FORMATS_OF
from autonl.export.formats import WITH_CUSTOM_OP, open_format, subdued
from autonl.export.timing import Run, Timing, interleaved, run_eager
from autonl.models import Ref, create_model

RUNTIMES = ("torch", *FORMATS_OF)
Shape = tuple[int, int, int]  # channels, height, width of what goes in


def time_networks(
    refs: Sequence[Ref],
    runtime: str,
    resolution: tuple[int, int] | None = None,
    threads: int = 1,
    rounds: int = 30,
    custom_op: bool = False,
) -> dict[str, Timing]:
    """Milliseconds an image of every network, all in turns; with fresh weights, in deploy form.

    custom_op  LightNL is one operator of the runtime's, see `autonl.export.custom_op`
    """
    if custom_op and FORMATS_OF.get(runtime) not in WITH_CUSTOM_OP:
        allowed = [name for name, form in FORMATS_OF.items() if form in WITH_CUSTOM_OP]
        refuse("--custom-op", runtime, f"a custom operator with --runtime {' or '.join(allowed)}")
    networks: dict[str, Any] = {str(ref): create_model(ref) for ref in refs}
    if custom_op and not any(has_lightnl(network) for network in networks.values()):
        raise AutoNLError("--custom-op: is for LightNL, which none of these networks has; leave it out")
    shapes = {name: model.pretrained_cfg["input_size"] for name, model in networks.items()}
    sizes = {name: resolution or (height, width) for name, (_, height, width) in shapes.items()}
    if len(set(sizes.values())) > 1:
        listed = ", ".join(f"{name} {height}x{width}" for name, (height, width) in sizes.items())
        raise AutoNLError(f"the networks are made for different sizes of image: {listed}; give one with --res")
    whole = {name: (model, (shapes[name][0], *sizes[name])) for name, model in networks.items()}
    with started(whole, runtime, threads, custom_op) as runs:
        return interleaved(runs, threads, rounds)


@contextmanager
def started(
    networks: Mapping[str, tuple[nn.Module, Shape]], runtime: str, threads: int, custom_op: bool = False
) -> Iterator[dict[str, Run]]:
    """Every network in deploy form in the runtime, ready to be run on one image of its shape."""
    if runtime not in RUNTIMES:
        refuse_name("runtime", runtime, RUNTIMES)
    with tempfile.TemporaryDirectory(prefix="autonl-") as folder:
        runs: dict[str, Run] = {}
        for place, (name, (network, shape)) in enumerate(networks.items()):
            try:
                runs[name] = start(network, shape, runtime, threads, Path(folder) / str(place), custom_op)
                runs[name]()
            except AutoNLError:
                raise
            except Exception as error:  # exporters and runtimes raise nearly everything
                told = f"{type(error).__name__} {' '.join(str(error).split())[:300]}"
                raise AutoNLError(
                    f"{name}: {runtime} cannot run it on images of {shape[1]}x{shape[2]}: {told}"
                ) from error
        yield runs


def start(network: nn.Module, shape: Shape, runtime: str, threads: int, stem: Path, custom_op: bool = False) -> Run:
    image = torch.rand(1, *shape, generator=torch.Generator().manual_seed(0))
    if runtime == "torch":
        torch.set_num_threads(threads)
        return partial(run_eager, deploy(network, shape[1:]), image)
    form = open_format(FORMATS_OF[runtime])
    assert form.start is not None  # the runtimes here are those that run everywhere
    path = stem.with_suffix(form.suffix)
    with subdued():
        deployed = deploy(network, shape[1:], form.layout, custom_op)
        if form.custom_op and has_custom_op(deployed):
            form.custom_op.build(path)
        form.write(deployed, image, path, False)
        return partial(form.start(path, threads), image.numpy())
