"""What a network is: frozen descriptions that cannot hold a wrong value."""

from __future__ import annotations

from dataclasses import dataclass, replace

from autonl.errors import refuse

ACTIVATIONS = ("relu", "relu6", "swish", "hard_swish")

# What may stand at a non-local place: Table 2 of the paper from wang to lightnl; "lightnl_energy", LightNL divided by
# what it attends to; and "depthwise", the control with LightNL's depthwise kernel and BN but no affinity.
OPERATORS = ("wang", "levi", "zhu", "eq3", "eq5", "eq7", "eq9", "lightnl", "lightnl_energy", "depthwise")


def _whole(field: str, value: object, low: int, high: int) -> None:
    # type() and not isinstance(): True is an int to Python, not to an architecture
    if type(value) is not int or not low <= value <= high:
        refuse(field, value, f"a whole number from {low} to {high}")


def _real(field: str, value: object, low: float, high: float, *, above: bool = False) -> None:
    # a comparison with NaN is false
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        refuse(field, value, f"a number from {low} to {high}")
    if above and value == low:
        refuse(field, value, f"a number above {low}")


def _channels(field: str, value: object) -> None:
    # every width in this family of networks is one, and timm's blocks round the expanded width to 8
    if type(value) is not int or not 8 <= value <= 65536 or value % 8:
        refuse(field, value, "a multiple of 8 from 8 to 65536")


def _one_of(field: str, value: object, allowed: tuple[object, ...]) -> None:
    if type(value) not in (int, str) or value not in allowed:
        refuse(field, value, ", ".join(map(str, allowed)))


@dataclass(frozen=True)
class LightNLSpec:
    """How compact the features of a LightNL block are (Eq. 9)."""

    ratio: float  # share of the channels that make the affinity
    stride: int  # one position in stride x stride is attended to

    def __post_init__(self) -> None:
        _real("lightnl.ratio", self.ratio, 0, 1, above=True)
        _whole("lightnl.stride", self.stride, 1, 64)

    def compact_chs(self, chs: int) -> int:
        return share_of(chs, self.ratio)


@dataclass(frozen=True)
class BlockSpec:
    """An inverted residual: 1x1 expansion, depthwise kernel, SE, 1x1 projection, LightNL, skip."""

    kernel: int
    stride: int
    expand: int  # 1 means no expansion convolution
    out_chs: int
    se: float = 0.0  # SE width as a share of the block's input channels; 0: no SE
    lightnl: LightNLSpec | None = None

    def __post_init__(self) -> None:
        _one_of("kernel", self.kernel, (3, 5, 7, 9, 11))
        _one_of("stride", self.stride, (1, 2))
        _whole("expand", self.expand, 1, 64)
        _channels("out_chs", self.out_chs)
        _real("se", self.se, 0, 1)
        if not (self.lightnl is None or isinstance(self.lightnl, LightNLSpec)):
            refuse("lightnl", self.lightnl, "a LightNLSpec or None")

    def se_chs(self, in_chs: int) -> int:
        return share_of(in_chs, self.se) if self.se else 0


@dataclass(frozen=True)
class ArchSpec:
    """A classifier: stem, blocks, head. Resolution and classes are the nominal ones."""

    name: str
    blocks: tuple[BlockSpec, ...]
    resolution: tuple[int, int] = (224, 224)  # height, width
    classes: int = 1000
    stem_chs: int = 32
    head_chs: int = 1280
    activation: str = "relu6"
    bn_eps: float = 1e-5
    bn_momentum: float = 0.1  # PyTorch's: the share of the new batch
    dropout: float = 0.0
    operator: str = "lightnl"  # what stands at the LightNL places

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name or not self.name.isprintable() or len(self.name) > 200:
            refuse("name", self.name, "1 to 200 printable characters")
        if not isinstance(self.blocks, tuple) or not all(isinstance(b, BlockSpec) for b in self.blocks):
            refuse("blocks", self.blocks, "a tuple of BlockSpec")
        if not 1 <= len(self.blocks) <= 1000:
            refuse("blocks", f"{len(self.blocks)} blocks", "1 to 1000 blocks")
        check_resolution("resolution", self.resolution)
        _whole("classes", self.classes, 1, 10_000_000)
        _channels("stem", self.stem_chs)
        _channels("head", self.head_chs)
        _one_of("activation", self.activation, ACTIVATIONS)
        _real("bn_eps", self.bn_eps, 0, 1, above=True)
        _real("bn_momentum", self.bn_momentum, 0, 1, above=True)
        _real("dropout", self.dropout, 0, 0.99)
        _one_of("operator", self.operator, OPERATORS)

    def scaled(self, width: float) -> ArchSpec:
        """The same network with its channels times `width`, named as timm does: `name_050`."""
        _real("width", width, 0.01, 100)
        return replace(
            self,
            name=f"{self.name}_{round(100 * width):03d}",
            stem_chs=divisible(self.stem_chs * width),
            head_chs=max(self.head_chs, divisible(self.head_chs * width)),
            blocks=tuple(replace(b, out_chs=divisible(b.out_chs * width)) for b in self.blocks),
        )

    def with_operator(self, operator: str) -> ArchSpec:
        """This network with `operator` at its non-local places, or behind every projection if it has none."""
        blocks = self.blocks
        if not any(b.lightnl for b in blocks):
            sizes = map_sizes(self, self.resolution)[1:]
            places = (LightNLSpec(0.25, paper_stride(*size)) for size in sizes)
            blocks = tuple(replace(b, lightnl=place) for b, place in zip(blocks, places, strict=True))
        return replace(self, name=f"{self.name}+{operator}", blocks=blocks, operator=operator)


def check_resolution(field: str, value: object) -> None:
    if not isinstance(value, tuple) or len(value) != 2:
        refuse(field, value, "a height and a width")
    for side in value:
        _whole(field, side, 1, 65536)


def share_of(chs: int, ratio: float) -> int:
    """int(ratio * chs), at least 1; a product that is whole but for its rounding error is whole."""
    return max(1, int(ratio * chs + 1e-6))


def paper_stride(height: int, width: int) -> int:
    """Section 4.1: attend to every second position where the map is larger than 14 x 14."""
    return 2 if max(height, width) > 14 else 1


def map_sizes(spec: ArchSpec, resolution: tuple[int, int]) -> list[tuple[int, int]]:
    """(height, width) behind the stem and behind every block, without dilation."""
    height, width = resolution
    sizes = []
    for stride in (2, *(block.stride for block in spec.blocks)):
        height, width = -(-height // stride), -(-width // stride)
        sizes.append((height, width))
    return sizes


def divisible(channels: float) -> int:
    """Channels to the nearest multiple of 8, never below 90 % of what was asked (timm's rule)."""
    rounded = max(8, int(channels + 4) // 8 * 8)
    return rounded + 8 if rounded < 0.9 * channels else rounded
