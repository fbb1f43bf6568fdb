"""What a network costs, in closed form: multiply-accumulates at batch 1, and parameters.

Convolutions, linear layers and matrix products are counted; pooling, BN, activations and additions
are not: exactly what `torch.utils.flop_counter.FlopCounterMode` / 2 counts.

`inverted_residual_macs` is plain arithmetic in its amounts, so the search calls it with gate tensors
where a network has integers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from autonl.arch.spec import ArchSpec, BlockSpec, LightNLSpec, check_resolution, map_sizes

# an int, or anything that adds and multiplies like one: a torch scalar made of gates, a symbolic size
Amount: TypeAlias = Any
Order = Literal["channel", "spatial"]

PYRAMID = (1, 3, 6, 8)  # Zhu et al.: the grids that keys and values are pooled to


def association_macs(positions: Amount, samples: Amount, affinity_chs: Amount, chs: Amount) -> dict[Order, Amount]:
    """Cost of x_c x_sc^T x_s (Eq. 4, Eq. 9) in both orders of association.

    x_c is positions x affinity_chs, x_sc is samples x affinity_chs, x_s is samples x chs.
    """
    return {
        "channel": (samples + positions) * affinity_chs * chs,  # x_c (x_sc^T x_s)
        "spatial": positions * samples * (affinity_chs + chs),  # (x_c x_sc^T) x_s
    }


def cheaper_order(positions: Amount, samples: Amount, affinity_chs: Amount, chs: Amount) -> Order:
    macs = association_macs(positions, samples, affinity_chs, chs)
    return "spatial" if macs["spatial"] < macs["channel"] else "channel"


def sampled(height: int, width: int, stride: int) -> int:
    """Positions that the strided slice [::stride, ::stride] keeps."""
    return -(-height // stride) * -(-width // stride)


def nonlocal_macs(operator: str, place: LightNLSpec, chs: int, height: int, width: int) -> int:
    """Cost of one non-local operator with its wrapper (Table 2) on a map of chs x height x width."""
    positions = height * width
    samples = sampled(height, width, place.stride)
    dense = association_macs(positions, positions, chs, chs)
    compact = association_macs(positions, samples, place.compact_chs(chs), chs)
    pooled = association_macs(positions, sum(grid * grid for grid in PYRAMID), chs, chs)
    pointwise = positions * chs * chs
    depthwise = 9 * positions * chs
    macs: dict[str, int] = {
        "wang": 4 * pointwise + dense["spatial"],
        "levi": 4 * pointwise + min(dense.values()),
        "zhu": 4 * pointwise + min(pooled.values()),
        "eq3": 3 * pointwise + min(dense.values()),
        "eq5": 2 * pointwise + min(dense.values()),
        "eq7": pointwise + min(dense.values()),
        "eq9": pointwise + min(compact.values()),
        "lightnl": depthwise + min(compact.values()),
        "lightnl_energy": depthwise + min(compact.values()),
        "depthwise": depthwise,
    }
    return macs[operator]


def nonlocal_params(operator: str, chs: int) -> int:
    """Parameters of one non-local operator: its 1x1 or depthwise kernels and the BN behind them."""
    pointwise_kernels = {"wang": 4, "levi": 4, "zhu": 4, "eq3": 3, "eq5": 2, "eq7": 1, "eq9": 1}
    kernels = pointwise_kernels[operator] * chs * chs if operator in pointwise_kernels else 9 * chs
    return kernels + 2 * chs


def inverted_residual_macs(
    in_chs: Amount,
    mid_chs: Amount,
    out_chs: Amount,
    kernel_area: Amount,
    se_chs: Amount,
    in_positions: Amount,
    out_positions: Amount,
    *,
    expanded: bool = True,
) -> Amount:
    """Cost of expansion, depthwise kernel, SE and projection."""
    expansion = in_positions * in_chs * mid_chs if expanded else 0
    depthwise = out_positions * kernel_area * mid_chs
    squeeze_excite = 2 * mid_chs * se_chs
    projection = out_positions * mid_chs * out_chs
    return expansion + depthwise + squeeze_excite + projection


def inverted_residual_params(in_chs: int, block: BlockSpec) -> int:
    mid_chs = in_chs * block.expand
    se_chs = block.se_chs(in_chs)
    expansion = (in_chs + 2) * mid_chs if block.expand > 1 else 0
    depthwise = (block.kernel**2 + 2) * mid_chs
    squeeze_excite = 2 * mid_chs * se_chs + se_chs + mid_chs if se_chs else 0
    projection = (mid_chs + 2) * block.out_chs
    return expansion + depthwise + squeeze_excite + projection


@dataclass(frozen=True)
class LayerCost:
    """One row of a profile. `nonlocal_macs` is the part of `macs` that the non-local operator takes."""

    name: str
    in_chs: int
    out_chs: int
    height: int  # of the output
    width: int
    macs: int
    params: int
    nonlocal_macs: int = 0


def layer_costs(spec: ArchSpec, resolution: tuple[int, int] | None = None) -> list[LayerCost]:
    """The cost of stem, every block, head and classifier at `resolution` (default: the nominal one)."""
    resolution = spec.resolution if resolution is None else resolution
    check_resolution("resolution", resolution)
    sizes = map_sizes(spec, resolution)
    (height, width), chs = sizes[0], spec.stem_chs
    layers = [LayerCost("stem", 3, chs, height, width, height * width * 27 * chs, (27 + 2) * chs)]
    for index, block in enumerate(spec.blocks):
        in_positions = height * width
        height, width = sizes[index + 1]
        macs = inverted_residual_macs(
            chs,
            chs * block.expand,
            block.out_chs,
            block.kernel**2,
            block.se_chs(chs),
            in_positions,
            height * width,
            expanded=block.expand > 1,
        )
        params = inverted_residual_params(chs, block)
        extra = 0
        if block.lightnl:
            extra = nonlocal_macs(spec.operator, block.lightnl, block.out_chs, height, width)
            params += nonlocal_params(spec.operator, block.out_chs)
        layers.append(LayerCost(f"block {index}", chs, block.out_chs, height, width, macs + extra, params, extra))
        chs = block.out_chs
    head = spec.head_chs
    layers.append(LayerCost("head", chs, head, height, width, height * width * chs * head, (chs + 2) * head))
    layers.append(LayerCost("classifier", head, spec.classes, 1, 1, head * spec.classes, (head + 1) * spec.classes))
    return layers


def amount(cost: float | None, unit: str = "macs") -> str:
    """A cost for people: 55.14M or 90.3k of MACs or parameters, 12.30 ms."""
    if cost is None:
        return "unknown"
    if unit == "milliseconds":
        return f"{milliseconds(cost)} ms"
    return f"{cost / 1e6:,.2f}M" if cost >= 1e6 else f"{cost / 1e3:,.1f}k"


def milliseconds(time: float) -> str:
    """12.30, and 0.0458: small networks take microseconds."""
    return f"{time:.2f}" if time >= 1 else f"{time:.4f}"


def count_macs(spec: ArchSpec, resolution: tuple[int, int] | None = None) -> int:
    return sum(layer.macs for layer in layer_costs(spec, resolution))


def count_params(spec: ArchSpec) -> int:
    return sum(layer.params for layer in layer_costs(spec))
