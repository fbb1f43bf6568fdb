"""A classifier becomes the backbone of torchvision's DeepLabv3 head."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.models.segmentation.deeplabv3 import DeepLabHead

from autonl.errors import AutoNLError
from autonl.models import Ref, create_model
from autonl.segment.config import OUTPUT_STRIDES, SegmentConfig
from autonl.train.config import load_config
from autonl.train.folder import CLASSES_FILE, CONFIG_FILE
from autonl.train.run import known_classes
from autonl.weights import BEST_WEIGHTS, FINAL_WEIGHTS, load_weights


class Segmenter(nn.Module):
    """Images (N, 3, H, W) -> the logits of every pixel (N, classes, H, W).

    The head is DeepLabv3's: a 1x1 convolution, three atrous 3x3 ones and the mean of the image, side by side. Their
    rates are 6, 12 and 18 on a map of stride 16 and reach as far in the image on any other. As in the MobileNetV2
    paper the head sees the last map before the classifier's wide 1x1 convolution.
    """

    def __init__(self, backbone: Any, classes: int) -> None:
        super().__init__()
        info, self.num_classes = backbone.feature_info, classes
        rates = [rate * 16 // info.reduction()[-1] for rate in (6, 12, 18)]
        self.backbone, self.head = backbone, DeepLabHead(info.channels()[-1], classes, rates)

    def forward(self, images: Tensor) -> Tensor:
        logits = self.head(self.backbone(images)[-1])  # (N, classes, H / stride, W / stride)
        # in single precision: between logits of 8 bits there are few values to go through
        return F.interpolate(logits.float(), images.shape[-2:], mode="bilinear", align_corners=False)


def create_backbone(ref: Ref, output_stride: int, arguments: dict[str, Any]) -> Any:
    """The network of a REF as timm's features, fresh, with dilation where its own stride is larger."""
    arguments = {"features_only": True} | arguments
    if output_stride != max(OUTPUT_STRIDES):
        arguments["output_stride"] = output_stride
    try:
        backbone: Any = create_model(ref, **arguments)
        stride = backbone.feature_info.reduction()[-1]
    except AutoNLError:
        raise
    except Exception as error:  # timm's networks refuse in many ways
        reason = f"{type(error).__name__} {' '.join(str(error).split())[:160]}".strip()
        raise AutoNLError(
            f"{name_of(ref)}: no backbone with features at output stride {output_stride}: {reason}; allowed: "
            "networks with timm's features_only, and with its output_stride for less than 32"
        ) from None
    if stride > output_stride:
        raise AutoNLError(f"{name_of(ref)}: its features have stride {stride}, segment.output_stride is "
                          f"{output_stride}")  # fmt: skip
    return backbone


def take_over(backbone: nn.Module, ref: Ref, weights: str | os.PathLike[str], arguments: dict[str, Any]) -> None:
    """The weights of the classifier of a REF, all but what lies behind the features."""
    classifier = create_model(ref, **arguments)
    load_weights(classifier, weights, other_classes=True)
    wanted, tensors = backbone.state_dict(), {}
    for name, tensor in classifier.state_dict().items():
        # as timm's features name them: as they are, with the first level joined, or inside a wrapper
        for form in (name, name.replace(".", "_", 1), f"model.{name}", f"body.{name}"):
            if form in wanted:
                tensors[form] = tensor
    missing = [name for name in wanted if name not in tensors]
    if missing:
        raise AutoNLError(f"{weights}: {missing[0]} of the backbone {name_of(ref)} is not among the classifier's names")
    backbone.load_state_dict(tensors)


def name_of(ref: Ref) -> str:
    return os.fspath(ref) if isinstance(ref, str | os.PathLike) else ref.name


def segment_config(folder: str | os.PathLike[str]) -> SegmentConfig:
    return load_config(str(Path(folder).absolute() / CONFIG_FILE), kind=SegmentConfig)


def load_segmenter(folder: str | os.PathLike[str], weights: str | os.PathLike[str] | None = None) -> Segmenter:
    """The network of the run folder of a segmentation with its weights, in eval mode."""
    path = Path(folder).absolute()  # never the zoo's network of that name
    config = segment_config(path)
    backbone = create_backbone(path, config.segment.output_stride, {})
    classes = known_classes(path)
    if not classes:
        raise AutoNLError(f"{path / CLASSES_FILE}: no class list there, which a segmentation's folder has")
    segmenter = Segmenter(backbone, len(classes))
    kept = (path / name for name in (FINAL_WEIGHTS, BEST_WEIGHTS))
    found = weights or next((file for file in kept if file.is_file()), None)
    if found is None:
        raise AutoNLError(f"{path}: has no weights yet")
    load_weights(segmenter, found)
    return segmenter.eval()
