"""What is around LightNL in a training step, layer by layer: depthwise convolutions, and BN with its activation.

    python -m benchmarks.layers [autonl_l autonl_s] [--batch 512] [--seconds 200] [--out benchmarks/results]

Microseconds of a layer's forward and backward pass in a CUDA graph (bf16, channels-last), by PyTorch and by our
kernels, and their sums over each network; PyTorch's backward pass of BN is a step less its forward pass. Of depthwise
convolutions, other ways to divide the work too, as many as fit into the seconds: the fastest is told.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autonl.models import create_model
from autonl.nn.kernels.layers import ACTIVATIONS, FusedDepthwise, FusedNormAct, use_layer_kernels
from benchmarks import RESULTS, compile_ahead, graph_us, require_cuda, write_rows
from benchmarks.lightnl import BANDWIDTH

TIMES = ("floor", "plain", "ours", "plain_back", "ours_back")
Layer = tuple[Any, ...]  # kind, channels, size, then kernel and stride, or activation


def layers_of(ref: str) -> Counter[Layer]:
    network = create_model(ref).eval()
    use_layer_kernels(network)
    found: Counter[Layer] = Counter()

    def note(layer: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        chs, size = inputs[0].shape[1:3]
        if isinstance(layer, FusedDepthwise):
            found["depthwise", chs, size, layer.kernel_size[0], layer.stride[0]] += 1
        else:
            found["norm", chs, size, ACTIVATIONS[type(layer.act)], ""] += 1

    for layer in network.modules():
        if isinstance(layer, FusedDepthwise | FusedNormAct):
            layer.register_forward_hook(note)
    with torch.no_grad():
        network(torch.zeros(1, 3, 224, 224))
    return found


def maps(batch: int, chs: int, size: int) -> Tensor:
    x = torch.randn(batch, chs, size, size, device="cuda", dtype=torch.bfloat16)
    return x.to(memory_format=torch.channels_last)


def depthwise_passes(
    batch: int, chs: int, size: int, kernel: int, stride: int, choice: Any = None
) -> Iterator[tuple[str, Callable[[Any], object], list[Any]]]:
    """(name, pass, inputs) of both ways."""
    from autonl.nn.kernels import depthwise_passes

    weight = torch.randn(chs, 1, kernel, kernel, device="cuda")
    narrow = weight.bfloat16()
    pairs = [(maps(batch, chs, size), maps(batch, chs, -(-size // stride))) for _ in range(2)]
    rest = (None, [stride] * 2, [kernel // 2] * 2, [1, 1], False, [0, 0], chs, [True, True, False])
    if choice is None:
        yield "plain", lambda pair: F.conv2d(pair[0], narrow, None, stride, kernel // 2, groups=chs), pairs
        yield "plain_back", lambda pair: torch.ops.aten.convolution_backward(pair[1], pair[0], narrow, *rest), pairs
    run = depthwise_passes.run_again
    yield "ours", lambda pair: depthwise_passes.forward(pair[0], weight, stride, run, choice), pairs
    yield "ours_back", lambda pair: depthwise_passes.backward(*pair, weight, stride, run, choice), pairs


def norm_passes(
    batch: int, chs: int, size: int, act: str, _: str
) -> Iterator[tuple[str, Callable[[Any], object], list[Any]]]:
    from autonl.nn.kernels import norm_act_passes

    makers: Any = {"silu": F.silu, "relu": F.relu, "relu6": F.relu6}  # in place, as timm has them
    function = partial(makers[act], inplace=True) if act in makers else nn.Identity()
    gamma, beta, mean = torch.randn(3, chs, device="cuda").unbind()
    variance, count = torch.ones(chs, device="cuda"), torch.zeros((), device="cuda", dtype=torch.int64)
    pairs = [(maps(batch, chs, size), maps(batch, chs, size)) for _ in range(2)]

    def plain_forward(pair: Any) -> Tensor:
        return function(F.batch_norm(pair[0], mean, variance, gamma, beta, True, 0.1, 1e-3))

    def plain_step(pair: Any) -> Any:
        x = pair[0].detach().requires_grad_()
        y = function(F.batch_norm(x, mean, variance, gamma_leaf, beta_leaf, True, 0.1, 1e-3))
        return torch.autograd.grad(y, (x, gamma_leaf, beta_leaf), pair[1])

    gamma_leaf, beta_leaf = (t.clone().requires_grad_() for t in (gamma, beta))
    yield "plain", plain_forward, pairs
    yield "plain_step", plain_step, pairs
    running, known = (mean, variance, count), (act, 1e-3)
    _, statistics = norm_act_passes.training(pairs[0][0], gamma, beta, *known, running, 0.1)
    yield "ours", lambda pair: norm_act_passes.training(pair[0], gamma, beta, *known, running, 0.1), pairs
    back = norm_act_passes.training_backward
    yield "ours_back", lambda pair: back(pair[1], pair[0], gamma, beta, statistics, *known), pairs


def floor_us(batch: int, layer: Layer) -> float:
    """The time to move a step's maps, forward and backward: of a convolution x, y and x, dy, dx; of BN, whose sums have
    to be there before its results, x twice, y and x twice, dy twice, dx."""
    kind, chs, size, _, stride = layer
    large, small = (8, 0) if kind == "norm" else (3, 2)
    values = batch * chs * (large * size**2 + small * (-(-size // (stride or 1))) ** 2)
    return values * 2 / BANDWIDTH * 1e6


def compile_layer(layer: Layer, choice: Any = None) -> None:
    kind, *shape = layer
    passes = depthwise_passes(2, *shape, choice) if kind == "depthwise" else norm_passes(2, *shape)
    for name, function, inputs in passes:
        if name.startswith("ours"):
            function(inputs[0])
    torch.cuda.synchronize()


def alternatives(layer: Layer) -> list[Any]:
    from autonl.nn.kernels.depthwise_passes import Problem, choice_for

    kind, chs, size, kernel, stride = layer
    if kind != "depthwise":
        return []
    chosen = choice_for(Problem(512, chs, size, size, kernel, stride))
    columns = chosen.columns
    changes: list[dict[str, int]] = [{"columns": columns // 2}, {"columns": columns * 2}]
    changes += [{"channels": channels} for channels in (16, 32, 64)] + [{"columns": columns // 2, "channels": 64}]
    changes += [{"weight_rows": rows} for rows in (2, 4, 7)] + [{"wide": wide} for wide in (1, 2, 3)]
    changes += [{"programs": programs} for programs in (528, 2112)]
    changes += [{"rows": 4}, {"rows": 7}, {"rows": 14}, {"warps": 4}, {"warps": 8}, {"pairs": 4}]
    found = [chosen._replace(**change) for change in changes]
    return [choice for choice in dict.fromkeys(found) if choice != chosen]


def time_layer(batch: int, layer: Layer) -> dict[str, Any]:
    kind, *shape = layer
    passes = depthwise_passes(batch, *shape) if kind == "depthwise" else norm_passes(batch, *shape)
    times = {name: round(graph_us(function, inputs), 1) for name, function, inputs in passes}
    if "plain_step" in times:
        times["plain_back"] = round(times["plain_step"] - times["plain"], 1)
    names = ("layer", "channels", "map", "kernel", "stride")
    times["floor"] = round(floor_us(batch, layer), 1)
    return dict(zip(names, layer, strict=True)) | {name: times[name] for name in TIMES}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("networks", nargs="*", default=["autonl_l", "autonl_s"])
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--seconds", type=float, default=200)
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    require_cuda()
    started = time.monotonic()
    counts = {ref: layers_of(ref) for ref in arguments.networks}
    layers = list(dict.fromkeys(layer for found in counts.values() for layer in found))
    compile_ahead(compile_layer, [(layer,) for layer in layers])
    rows = []
    for layer in layers:
        rows.append(time_layer(arguments.batch, layer))
        print(*(f"{name} {value}" for name, value in rows[-1].items()), flush=True)
        write_rows("speed_layers", rows, arguments.out)
    for ref, found in counts.items():
        for kind in ("depthwise", "norm"):
            picked = [(row, found[layer]) for layer, row in zip(layers, rows, strict=True) if layer[0] == kind]
            sums = {name: sum(row[name] * count for row, count in picked) / 1e3 for name in TIMES}
            print(ref, kind, {name: f"{value:.2f} ms" for name, value in sums.items()}, flush=True)
    tried = [(layer, choice) for layer in layers for choice in alternatives(layer)]
    compile_ahead(compile_layer, tried)
    found_rows = []
    for layer, choice in tried:
        if time.monotonic() - started > arguments.seconds:
            break
        try:
            passes = depthwise_passes(arguments.batch, *layer[1:], choice)
            times = {name: round(graph_us(function, inputs), 1) for name, function, inputs in passes}
        except Exception as error:  # of a division that does not fit
            print("failed", layer, choice, str(error)[:100], flush=True)
            continue
        found_rows.append({"layer": layer, **choice._asdict(), **times})
        write_rows("speed_layers_tiles", found_rows, arguments.out)
    for layer, row in zip(layers, rows, strict=True):
        for name in ("ours", "ours_back"):
            own = sorted((other for other in found_rows if other["layer"] == layer), key=lambda other: other[name])
            if own and own[0][name] < 0.97 * row[name]:
                print("faster", layer, name, row[name], "->", own[0], flush=True)


if __name__ == "__main__":
    main()
