"""The named architectures: one YAML a family beside this file, widths derived from it."""

from dataclasses import dataclass
from importlib import resources

from autonl.arch.codec import read_arch
from autonl.arch.spec import ArchSpec
from autonl.errors import refuse_name

# family -> widths in percent; a family without widths is one network
FAMILIES: dict[str, tuple[int, ...]] = {
    "mobilenetv2": (35, 50, 75, 100, 140),
    "mobilenetv2_lightnl": (35, 50, 75, 100, 140),
    "autonl_s": (),
    "autonl_l": (),
    "digits": (),
}
ZOO: dict[str, tuple[str, int | None]] = {
    f"{family}_{width:03d}" if width else family: (family, width)
    for family, widths in FAMILIES.items()
    for width in (widths or (None,))
}


@dataclass(frozen=True)
class PaperNumbers:
    """What the paper prints for a network: millions of MACs and parameters, ImageNet accuracy in percent."""

    macs: float
    top1: float
    params: float | None = None
    top5: float | None = None


PAPER = {
    "mobilenetv2_100": PaperNumbers(301, 73.4, 3.4, 91.4),
    "mobilenetv2_lightnl_100": PaperNumbers(316, 75.0),
    "autonl_s": PaperNumbers(267, 76.5, 4.4, 93.1),
    "autonl_l": PaperNumbers(353, 77.7, 5.6, 93.7),
}


def zoo_arch(name: str) -> ArchSpec:
    if name not in ZOO:
        refuse_name("network", name, ZOO)
    family, width = ZOO[name]
    with resources.as_file(resources.files(__package__) / f"{family}.yaml") as path:
        spec = read_arch(path)
    return spec.scaled(width / 100) if width else spec
