"""The architecture as a row of blocks: what each is and costs, for the drawing and for whoever points at one."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from autonl.arch.macs import LayerCost, amount
from autonl.arch.spec import BlockSpec
from autonl.report.runs import Run


@dataclass
class Part:
    """Stem, block, head or classifier; or a block that the search left out."""

    name: str
    kind: str  # fixed, block, dropped
    details: list[tuple[str, str]]
    kernel: int = 0
    stride: int = 1
    expand: int = 0
    channels: int = 0
    se: bool = False
    lightnl: str = ""
    heights: dict[str, float] = field(default_factory=dict)  # 0 to 1, by what the drawing shows

    @property
    def label(self) -> str:
        return f"{self.name}: " + ", ".join(f"{name} {value}" for name, value in self.details)

    def data(self) -> dict[str, Any]:
        return {"name": self.name, "details": self.details, "heights": self.heights}


def draw(run: Run) -> list[Part]:
    """Every layer of the network in order, with the blocks that the search left out where they stood."""
    if run.spec is None:
        return []
    stem, *layers, head, classifier = run.layers
    blocks = iter(zip(run.spec.blocks, layers, strict=True))
    parts = [fixed(run, stem), block_part(run, *next(blocks))]  # the first block is never searched
    kept = run.search.kept if run.search else []
    if sum(kept) + 1 == len(run.spec.blocks):
        for place, stays in enumerate(kept):
            parts.append(block_part(run, *next(blocks), place) if stays else dropped(run, place))
    parts += [block_part(run, *rest) for rest in blocks]
    parts += [fixed(run, head), fixed(run, classifier)]
    for what, value in (("expansion", "expand"), ("MACs", "macs"), ("params", "params")):
        scale(parts, what, value, run)
    return parts


def block_part(run: Run, block: BlockSpec, layer: LayerCost, place: int | None = None) -> Part:
    share = 100 * layer.macs / (run.macs or 1)
    lightnl = block.lightnl
    details = [
        ("channels", f"{layer.in_chs} to {layer.out_chs}"),
        ("map", f"{layer.height} x {layer.width}"),
        ("kernel", f"{block.kernel}, stride {block.stride}"),
        ("expansion", str(block.expand)),
        ("SE", f"{block.se:g}" if block.se else "none"),
        ("LightNL", f"{lightnl.ratio:g} of the channels, stride {lightnl.stride}" if lightnl else "none"),
        ("MACs", f"{amount(layer.macs)} ({share:.1f} %)"),
        ("of them LightNL", amount(layer.nonlocal_macs)),
        ("params", f"{layer.params:,}"),
    ]
    if run.search and place is not None:
        details += margins_of(run, place)
    return Part(
        layer.name,
        "block",
        details,
        kernel=block.kernel,
        stride=block.stride,
        expand=block.expand,
        channels=block.out_chs,
        se=bool(block.se),
        lightnl=f"{lightnl.ratio:g}/{lightnl.stride}".removeprefix("0") if lightnl else "",
    )


def margins_of(run: Run, place: int) -> list[tuple[str, str]]:
    """How far each gate of a searched block was from the other answer when the search ended."""
    record = run.search
    assert record is not None
    return [
        (
            f"margin: {record.gate_name(gate)}",
            "always open" if (place, gate) in record.always_open else f"{margin:+.2f}",
        )
        for gate, margin in enumerate(record.margins[-1][place])
    ]


def dropped(run: Run, place: int) -> Part:
    return Part(f"searched block {place + 1}", "dropped", [("left out", "by the search"), *margins_of(run, place)])


def fixed(run: Run, layer: LayerCost) -> Part:
    share = 100 * layer.macs / (run.macs or 1)
    details = [
        ("channels", f"{layer.in_chs} to {layer.out_chs}"),
        ("map", f"{layer.height} x {layer.width}"),
        ("MACs", f"{amount(layer.macs)} ({share:.1f} %)"),
        ("params", f"{layer.params:,}"),
    ]
    return Part(layer.name, "fixed", details, channels=layer.out_chs)


def scale(parts: list[Part], what: str, field_name: str, run: Run) -> None:
    """The height of every part as a share of the highest block's; a part without a value is small."""
    costs = {layer.name: layer for layer in run.layers}
    values = {
        part.name: float(part.expand if field_name == "expand" else getattr(costs[part.name], field_name))
        for part in parts
        if part.kind != "dropped"
    }
    highest = max(values.values()) or 1.0
    for part in parts:
        part.heights[what] = round(values.get(part.name, 0.0) / highest, 3)
