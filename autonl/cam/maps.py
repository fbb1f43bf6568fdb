"""Class activation maps (Zhou et al., CVPR 2016): where in the image the score of a class comes from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn

from autonl.errors import AutoNLError

# share of the largest logit by which the mean of the maps may miss the logits: far above rounding, even in bf16
TOLERANCE = 0.01

Classes = Tensor | Sequence[int] | Sequence[Sequence[int]]


class ClassMaps(NamedTuple):
    maps: Tensor  # (N, K, h, w)
    logits: Tensor  # (N, C)


@torch.no_grad()
def class_activation_map(model: Any, images: Tensor, classes: Classes | None = None) -> ClassMaps:
    """The maps of K classes an image, and the logits of all C classes.

        map_c(x, y) = sum_k w_ck f_k(x, y)               so that  mean of map_c + bias_c = logit_c

    f are the features before the pooling, w is the classifier's weight. It holds for a head of average pooling and
    one linear layer; any other is refused.

    model    a classifier with timm's `forward_features`, `forward_head` and `get_classifier`, in eval mode
    images   (N, 3, H, W), normalised as the network wants them
    classes  (N,) or (N, K) numbers of classes; default: the predicted one of every image
    """
    features, logits, classifier = features_and_logits(model, images)
    chosen = logits.argmax(1) if classes is None else torch.as_tensor(classes, device=logits.device)
    chosen = chosen.view(len(images), -1)  # (N, K)
    if chosen.numel() and not 0 <= int(chosen.min()) <= int(chosen.max()) < logits.shape[1]:
        raise AutoNLError(f"classes: the network has classes 0 to {logits.shape[1] - 1}, not {chosen.tolist()}")
    maps = classifier.weight.float()[chosen] @ features.flatten(2)  # (N, K, D) (N, D, hw) -> (N, K, hw)
    return ClassMaps(maps.unflatten(2, features.shape[2:]), logits)


def features_and_logits(model: Any, images: Tensor) -> tuple[Tensor, Tensor, nn.Linear]:
    """(N, D, h, w) before the pooling, (N, C), and the linear layer that alone stands between them."""
    if model.training:
        raise AutoNLError("the network is in training mode; a map is taken in eval mode")
    for method in ("forward_features", "forward_head", "get_classifier"):
        if not hasattr(model, method):
            raise AutoNLError(f"no class activation map: the network has no {method}, as timm's classifiers have")
    classifier = model.get_classifier()
    if not isinstance(classifier, nn.Linear):
        refuse_head(f"its classifier is {type(classifier).__name__}")
    features = model.forward_features(images)
    if not isinstance(features, Tensor) or features.dim() != 4:
        refuse_head("its features are no map over the image")
    logits = model.forward_head(features).float()
    if getattr(model, "output_fmt", "NCHW") == "NHWC":
        features = features.permute(0, 3, 1, 2)
    features = features.float()
    chs = features.shape[1]
    if chs != classifier.in_features:
        refuse_head(f"between its {chs} channels and the {classifier.in_features} of its classifier is more")
    bias = 0 if classifier.bias is None else classifier.bias.float()
    explained = features.mean((2, 3)) @ classifier.weight.float().mT + bias  # (N, D) (D, C) -> (N, C)
    if not logits.isfinite().all():
        raise AutoNLError("no class activation map: the network's logits are not finite")
    if (explained - logits).abs().max() > TOLERANCE * logits.abs().max():
        refuse_head("the means of its maps are not its logits")
    return features, logits, classifier


def refuse_head(why: str) -> NoReturn:
    raise AutoNLError(f"no class activation map: {why}; allowed: a head of average pooling and one linear layer")
