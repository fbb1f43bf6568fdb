"""Settings of a segmentation: those of a training, and the section `segment`."""

from __future__ import annotations

from dataclasses import dataclass, field

from autonl.data.config import AugmentConfig, DataConfig, at_least, between
from autonl.errors import refuse
from autonl.train.config import Config

OUTPUT_STRIDES = (8, 16, 32)

# settings of the data that a segmentation has no choice in, and why
FIXED = {
    "crop_pct": (1.0, "the whole image is seen"),
    "interpolation": ("bilinear", "the one that images and masks are scaled with"),
    "selection": (0.0, "it is judged by its validation images"),
    "max_corrupt": (0, "the first image or mask that cannot be read ends it"),
}


@dataclass(frozen=True)
class SegmentSettings:
    output_stride: int = 16  # image pixels a pixel of the map that the head sees; 32: no dilation
    head_lr: float = 10.0  # the head's learning rate, times that of the backbone
    scale: tuple[float, float] = (0.5, 2.0)  # size of a training image, times that of an evaluation
    pictures: int = 6  # validation images that are drawn at the end

    def __post_init__(self) -> None:
        if self.output_stride not in OUTPUT_STRIDES:
            refuse("segment.output_stride", self.output_stride, ", ".join(map(str, OUTPUT_STRIDES)))
        at_least("segment.head_lr", self.head_lr, 0)
        between("segment.scale", self.scale[0], 0.01, self.scale[1])
        between("segment.scale", self.scale[1], 0.01, 100)
        between("segment.pictures", self.pictures, 0, 50)


@dataclass(frozen=True)
class SegmentConfig(Config):
    segment: SegmentSettings = field(default_factory=SegmentSettings)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, (allowed, reason) in FIXED.items():
            if getattr(self.data, name) not in (allowed, getattr(DataConfig(), name)):
                refuse(f"data.{name}", getattr(self.data, name), f"{allowed}: {reason}")
        for name in ("scale", "ratio", "auto_augment"):  # what would otherwise be ignored without a word
            if getattr(self.augment, name) != getattr(AugmentConfig(), name):
                refuse(f"augment.{name}", getattr(self.augment, name), "segment.scale, augment.flip, augment.colour")
