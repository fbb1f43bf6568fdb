"""What is learned: a class a pixel. What is measured: the mean over the classes of intersection over union."""

from __future__ import annotations

import torch.nn.functional as F
from timm.optim import param_groups_weight_decay
from torch import Tensor, nn
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassJaccardIndex

from autonl.data.memory import Batch
from autonl.data.pairs import VOID
from autonl.errors import AutoNLError
from autonl.segment.config import SegmentConfig
from autonl.train.tasks import CrossEntropy, Task, Tuning, create_optimizer, create_schedule


class Segmentation(Task):
    """Cross-entropy of the pixels that are not void; mean IoU and pixel accuracy in percent."""

    monitor = "miou"
    recorded = True

    def __init__(self, classes: int, config: SegmentConfig) -> None:
        self.classes, self.config = classes, config

    def tunings(self, module: nn.Module, steps_per_epoch: int) -> list[Tuning]:
        optim, groups = self.config.optim, []
        for part, times in (("backbone", 1.0), ("head", self.config.segment.head_lr)):
            parameters = param_groups_weight_decay(module.get_submodule(part), optim.weight_decay)
            groups += [group | {"lr": times * optim.lr} for group in parameters]
        optimizer = create_optimizer(groups, optim)
        return [(optimizer, create_schedule(optimizer, self.config.schedule, steps_per_epoch))]

    def step(self, model: nn.Module, batch: Batch, step: int) -> dict[str, Tensor]:
        images, masks = batch
        smoothing = self.config.optim.label_smoothing
        total = F.cross_entropy(
            model(images), masks.long(), ignore_index=VOID, label_smoothing=smoothing, reduction="sum"
        )
        # not torch's mean, which is NaN where crops show nothing but void
        return {"loss": total / (masks != VOID).sum().clamp(min=1)}

    def metrics(self) -> MetricCollection:
        self.iou = MeanIoU(self.classes)
        entropy = CrossEntropy(VOID, "val_pixels")
        return MetricCollection({"iou": self.iou, "cross_entropy": entropy}, compute_groups=False)

    def evaluate(self, module: nn.Module, batch: Batch, metrics: MetricCollection) -> None:
        images, masks = batch
        metrics.update(module(images), masks.long())


class MeanIoU(MulticlassJaccardIndex):
    """From one confusion matrix of the pixels of all images and processes, void left out.

    A class that is neither in the masks nor predicted has no IoU and does not enter the mean, as in VOC's results.
    """

    confmat: Tensor  # (classes, classes): true, predicted
    by_class: list[float]  # percent, NaN without pixels: of all processes, once `compute` has been called

    def __init__(self, classes: int) -> None:
        super().__init__(classes, ignore_index=VOID, validate_args=False)

    def compute(self) -> dict[str, Tensor]:  # type: ignore[override]
        counts = self.confmat.double()  # the class counts in single precision, exact to 16.7M pixels
        if not counts.any():
            raise AutoNLError(f"no pixel of the validation masks counts: all are void, {VOID}")
        right = counts.diag()
        iou = 100 * right / (counts.sum(0) + counts.sum(1) - right)
        self.by_class = iou.tolist()
        return {"miou": iou.nanmean(), "pixel_accuracy": 100 * right.sum() / counts.sum()}
