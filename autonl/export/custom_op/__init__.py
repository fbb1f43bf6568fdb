"""LightNL as one custom operator of ONNX Runtime and OpenVINO: one pass over a map in place of ten operators.

`lightnl.h` is the pass, with a file beside it for each runtime. The machine that writes a file compiles them, into a
library that lies beside it. In the graph the operator takes maps with channels last and adds a block's shortcut too.
"""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from autonl.errors import AutoNLError
from autonl.nn.light_nonlocal import LightNL

SOURCES = Path(__file__).parent
NAME = "LightNL"  # in the domain autonl
# as deployed_lightnl has them, behind its three inputs
ATTRIBUTES = {"height": int, "width": int, "compact": int, "stride": int, "energy_eps": float}


@torch.library.custom_op("autonl::deployed_lightnl", mutates_args=())
def deployed_lightnl(
    x: Tensor, taps: Tensor, bias: Tensor, height: int, width: int, compact: int, stride: int, energy_eps: float,
    shortcut: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """What `lightnl.h` does: x and shortcut (N, H, W, C), taps (9, C), bias (C) -> (N, H, W, C)."""
    images, channels = x.shape[0], x.shape[3]
    x_s = x[:, ::stride, ::stride].reshape(images, -1, channels)  # (N, S, C)
    x_sc, x_c = x_s[..., :compact], x.reshape(images, -1, channels)[..., :compact]
    gram = torch.bmm(x_sc.transpose(1, 2), x_s) / (height * width)  # (N, Cr, C)
    if energy_eps:
        energy = (x_sc * x_sc).sum((1, 2), keepdim=True) / (compact * height * width)
        gram = gram / (energy + energy_eps)
    y = torch.bmm(x_c, gram).reshape(x.shape).permute(0, 3, 1, 2)  # (N, C, H, W)
    z = F.conv2d(y, taps.t().reshape(channels, 1, 3, 3), bias, padding=1, groups=channels).permute(0, 2, 3, 1) + x
    return (z if shortcut is None else z + shortcut).contiguous()


@deployed_lightnl.register_fake
def _(
    x: Tensor, taps: Tensor, bias: Tensor, height: int, width: int, compact: int, stride: int, energy_eps: float,
    shortcut: Tensor | None = None,
) -> Tensor:  # fmt: skip
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


class CustomLightNL(nn.Module):
    """LightNL by that operator, its BN in the depthwise kernel; for maps of one size, as the network around it."""

    def __init__(self, block: LightNL, size: tuple[int, int]) -> None:
        super().__init__()
        self.known = (*size, block.compact_chs, block.stride, block.energy_eps)
        depthwise: Any = fuse_conv_bn_eval(block.depthwise, block.bn)
        self.register_buffer("taps", depthwise.weight.detach().flatten(1).t().contiguous())  # (9, C)
        self.register_buffer("bias", depthwise.bias.detach().clone())

    def forward(self, x: Tensor, shortcut: Tensor | None = None) -> Tensor:
        if tuple(x.shape[2:]) != self.known[:2]:
            sizes = "x".join(map(str, x.shape[2:])), "x".join(map(str, self.known[:2]))
            raise AutoNLError(f"LightNL in deploy form: a map of {sizes[0]} is not allowed; allowed: {sizes[1]}")
        maps = [map_.permute(0, 2, 3, 1) for map_ in (x, shortcut) if map_ is not None]
        z = torch.ops.autonl.deployed_lightnl(maps[0], self.taps, self.bias, *self.known, *maps[1:])  # (N, H, W, C)
        return z.permute(0, 3, 1, 2)


class ShortcutBlock(nn.Module):
    """A block whose shortcut the operator at its end adds."""

    def __init__(self, body: nn.Module, lightnl: CustomLightNL) -> None:
        super().__init__()
        self.body, self.lightnl = body, lightnl

    def forward(self, x: Tensor) -> Tensor:
        return self.lightnl(self.body(x), x)


def with_shortcut(block: Any) -> ShortcutBlock | None:
    """A block of timm's with the addition of its shortcut in the operator, where it ends in one and has a shortcut."""
    *body, last, _ = block.children()  # behind the last norm there is stochastic depth, which does nothing here
    return ShortcutBlock(nn.Sequential(*body), last) if block.has_skip and isinstance(last, CustomLightNL) else None


def library_of(path: Path) -> Path:
    """The operator's library, beside the file that wants it; a whole path, or it would be looked for elsewhere."""
    return path.absolute().with_name(f"{path.name}.so")


def has_lightnl(network: nn.Module) -> bool:
    """Whether the operator has something to do, in a network that is not in deploy form yet."""
    return any(isinstance(module, LightNL) for module in network.modules())


def has_custom_op(network: nn.Module) -> bool:
    return any(isinstance(module, CustomLightNL) for module in network.modules())


def compile_library(path: Path, source: str, more: Sequence[str] = ()) -> None:
    """Make the operator for the file at `path`, for this machine's processor.

    CXX names another compiler; CXXFLAGS come behind our flags.
    """
    this_processor = "-mcpu=native" if platform.machine() in ("aarch64", "arm64") else "-march=native"
    flags = ["-std=c++17", "-O3", this_processor, *words_of("CXXFLAGS", ""), "-shared", "-fPIC"]
    compiler = words_of("CXX", "c++")
    target = [str(SOURCES / source), *more, "-o", str(library_of(path))]
    plain = os.environ | {"LC_ALL": "C"}
    try:
        subprocess.run([*compiler, *flags, *target], check=True, capture_output=True, text=True, env=plain)
    except OSError:
        why = f"needs a C++ compiler, and {compiler[0]} does not run; CXX names another"
        raise AutoNLError(f"--custom-op: {why}") from None
    except subprocess.CalledProcessError as error:
        lines = error.stderr.splitlines() or ["it does not say why"]
        reason = next((line for line in lines if "error" in line), lines[-1])
        raise AutoNLError(f"--custom-op: {' '.join(compiler)} cannot compile it: {reason}") from None


def words_of(variable: str, default: str) -> list[str]:
    """Of an environment variable, as a shell would read it."""
    try:
        return shlex.split(os.environ.get(variable, "")) or shlex.split(default)
    except ValueError as error:
        raise AutoNLError(f"{variable}: {os.environ[variable]!r} cannot be read: {error}") from None
