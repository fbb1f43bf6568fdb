"""What a network costs, block by block: MACs and parameters."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from autonl.arch.codec import block_to_string, resolution_to_text
from autonl.arch.macs import LayerCost, layer_costs
from autonl.arch.spec import ArchSpec, check_resolution
from autonl.errors import AutoNLError
from autonl.models import Ref, create_model, resolve
from autonl.nn.insertion import insert_lightnl


@dataclass(frozen=True)
class Profile:
    name: str
    resolution: tuple[int, int]
    macs: int
    params: int
    blocks: list[dict[str, Any]]  # one row a layer, in order; their macs and params add up to the totals

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"resolution": resolution_to_text(self.resolution)}


def profile(ref: Ref, resolution: tuple[int, int] | None = None, operator: str | None = None) -> Profile:
    """Cost of the network that REF names, at (height, width), optionally with a non-local operator.

    The zoo and arch.yaml are counted in closed form, timm:NAME with torch's flop counter on meta tensors;
    a run folder of such a network with the classes and arguments that it was trained with.
    """
    target = resolve(ref)
    if isinstance(target, str):
        return _profile_timm(f"timm:{target}", create_model(ref), resolution, operator)
    spec = target.with_operator(operator) if operator else target
    rows = _rows(spec, layer_costs(spec, resolution))
    return _total(spec.name, resolution or spec.resolution, rows)


def _rows(spec: ArchSpec, layers: list[LayerCost]) -> list[dict[str, Any]]:
    blocks = ["", *map(block_to_string, spec.blocks), "", ""]
    return [asdict(layer) | {"block": block} for layer, block in zip(layers, blocks, strict=True)]


def _total(name: str, resolution: tuple[int, int], rows: list[dict[str, Any]]) -> Profile:
    return Profile(name, resolution, sum(row["macs"] for row in rows), sum(row["params"] for row in rows), rows)


def _profile_timm(name: str, model: Any, resolution: tuple[int, int] | None, operator: str | None) -> Profile:
    if resolution is not None:
        check_resolution("resolution", resolution)
    if operator:
        insert_lightnl(model, operator=operator)
    model = model.to("meta").eval()
    channels, height, width = model.pretrained_cfg["input_size"]
    height, width = resolution or (height, width)
    counter = FlopCounterMode(display=False)
    try:
        with torch.no_grad(), counter:
            model(torch.empty(1, channels, height, width, device="meta"))
    except Exception as error:  # a timm network may have any reason to refuse a size
        reason = " ".join(str(error).split())[:200]
        raise AutoNLError(f"{name} does not run at {height}x{width}: {reason}") from None
    macs = {path: sum(ops.values()) // 2 for path, ops in counter.get_flop_counts().items()}
    rows: list[dict[str, Any]] = []
    for child, module in model.named_children():
        params = sum(p.numel() for p in module.parameters())
        rows.append({"name": child, "macs": macs.get(f"{type(model).__name__}.{child}", 0), "params": params})
    # parameters and products of the model itself, outside its children
    own_macs = counter.get_total_flops() // 2 - sum(row["macs"] for row in rows)
    own_params = sum(p.numel() for p in model.parameters()) - sum(row["params"] for row in rows)
    if own_macs or own_params:
        rows.append({"name": "itself", "macs": own_macs, "params": own_params})
    return _total(name + (f"+{operator}" if operator else ""), (height, width), rows)
