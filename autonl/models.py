"""REF -> network. A REF is a zoo name, an arch.yaml, a run folder, or timm:NAME."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import timm
import yaml
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.models import build_model_with_cfg, register_model
from timm.models._builder import pretrained_cfg_for_features
from timm.models._efficientnet_builder import resolve_bn_args
from torch import nn

from autonl.arch.codec import read_arch
from autonl.arch.spec import OPERATORS, ArchSpec, map_sizes
from autonl.arch.zoo import ZOO, zoo_arch
from autonl.errors import AutoNLError, refuse_name, shown
from autonl.nn.network import Network, NetworkFeatures

TIMM_PREFIX = "timm:"
ARCH_FILE = "arch.yaml"
RUN_FILE = "run.yaml"  # in a run folder: the REF and timm's arguments that the network was made with

Ref = str | os.PathLike[str] | ArchSpec


def resolve(ref: Ref) -> ArchSpec | str:
    """The architecture a REF names; for timm:NAME, the name as timm knows it."""
    if isinstance(ref, ArchSpec):
        return ref
    text = os.fspath(ref)
    if text.startswith(TIMM_PREFIX):
        name = text.removeprefix(TIMM_PREFIX)
        if not timm.is_model(name):
            refuse_name("timm network", name, timm.list_models())
        return name
    if text in ZOO:
        return zoo_arch(text)
    path = Path(text)
    if folder := run_folder(ref):
        if (folder / ARCH_FILE).is_file():
            return read_arch(folder / ARCH_FILE)
        origin = read_run(folder).get("ref")
        if isinstance(origin, str) and origin.startswith(TIMM_PREFIX):
            return resolve(origin)
        raise AutoNLError(f"{text}: the folder holds no {ARCH_FILE}; a run folder does")
    if os.path.isfile(text) or path.suffix in (".yaml", ".yml"):
        return read_arch(path)
    if os.sep in text:
        raise AutoNLError(f"{text}: no such run folder; `autonl models` names the networks that need none")
    refuse_name("network (zoo name, arch.yaml, run folder or timm:NAME)", text, ZOO)


def with_operator(ref: Ref, operator: str) -> ArchSpec:
    """The architecture a REF names with `operator` at its non-local places, behind every projection if it has none."""
    if operator not in OPERATORS:
        refuse_name("operator", operator, OPERATORS)
    spec = resolve(ref)
    if isinstance(spec, str):
        raise AutoNLError(
            f"{ref}: takes no non-local operator; allowed: a zoo name, an arch.yaml, or a run folder of one"
        )
    return spec.with_operator(operator)


def run_folder(ref: Ref) -> Path | None:
    """The folder that a REF names; None for any other REF, a name of the zoo that a folder has too among them."""
    if isinstance(ref, ArchSpec):
        return None
    text = os.fspath(ref)
    named = not text or text in ZOO or text.startswith(TIMM_PREFIX)
    return Path(text) if not named and os.path.isdir(text) else None


def create_model(ref: Ref, *, pretrained: bool = False, **timm_arguments: Any) -> nn.Module:
    """The network that a REF names, with fresh weights; a run folder's with the arguments it was trained with.

    Keyword arguments are timm's: `num_classes`, `in_chans`, `drop_rate`, `drop_path_rate`, `features_only`,
    `out_indices`, `output_stride`, `global_pool`, `pad_type` ...

        model = autonl.create_model("autonl_l", num_classes=10)
    """
    target = resolve(ref)
    if pretrained and isinstance(target, ArchSpec):
        raise AutoNLError(f"{target.name}: there are no weights to download; train it, or give a file of weights")
    kept = run_arguments(ref)
    timm_arguments = kept | timm_arguments
    try:
        if isinstance(target, str):
            return timm.create_model(target, pretrained=pretrained, **timm_arguments)
        return build(target, **timm_arguments)
    except Exception as error:  # timm's networks refuse an argument in many ways
        if not kept or isinstance(error, AutoNLError):
            raise
        reason = f"{type(error).__name__} {' '.join(str(error).split())[:200]}"
        raise AutoNLError(f"{ref}: the network cannot be made with {shown(timm_arguments)}: {reason}") from None


def read_run(folder: Path) -> dict[str, Any]:
    """What a run folder tells of itself; nothing where it tells nothing."""
    try:
        content = yaml.safe_load((folder / RUN_FILE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, yaml.YAMLError, ValueError) as error:
        raise AutoNLError(f"{folder / RUN_FILE}: cannot be read: {' '.join(str(error).split())[:200]}") from None
    return content if isinstance(content, dict) else {}


def run_arguments(ref: Ref) -> dict[str, Any]:
    """timm's arguments that the network of a run folder was made with; none for any other REF."""
    folder = run_folder(ref)
    arguments = read_run(folder).get("model", {}) if folder else {}
    return arguments if isinstance(arguments, dict) else {}


def build(spec: ArchSpec, **timm_arguments: Any) -> nn.Module:
    """The network of a spec; `features_only=True` gives the backbone, `feature_cls` "getter" or "hook" timm's own.

    `bn_eps` and `bn_momentum` of timm change the spec's, LightNL's BN included.
    """
    bn = resolve_bn_args(timm_arguments)
    spec = replace(spec, **{f"bn_{name}": value for name, value in bn.items()})
    own_features = timm_arguments.get("features_only") and "feature_cls" not in timm_arguments
    if own_features:
        del timm_arguments["features_only"]
    model = build_model_with_cfg(
        NetworkFeatures if own_features else Network,
        spec.name,
        pretrained=False,
        pretrained_cfg=timm_arguments.pop("pretrained_cfg", None) or default_cfg(spec),
        kwargs_filter=("num_classes", "global_pool") if own_features else None,
        spec=spec,
        **timm_arguments,
    )
    if own_features:
        model.pretrained_cfg = model.default_cfg = pretrained_cfg_for_features(model.pretrained_cfg)
    return model


def default_cfg(spec: ArchSpec) -> dict[str, Any]:
    """What timm's data and training tools want to know of a network."""
    height, width = spec.resolution
    last_height, last_width = map_sizes(spec, spec.resolution)[-1]
    return {
        "url": "",
        "num_classes": spec.classes,
        "input_size": (3, height, width),
        "pool_size": (last_height, last_width),
        "crop_pct": 0.875,
        "interpolation": "bicubic",
        "mean": IMAGENET_DEFAULT_MEAN,
        "std": IMAGENET_DEFAULT_STD,
        "first_conv": "conv_stem",
        "classifier": "classifier",
    }


# The zoo's networks that timm does not have under the same name: `timm.create_model("autonl_l")` builds them
# once autonl is imported. timm's own mobilenetv2_* stay timm's.
REGISTERED = tuple(name for name in ZOO if not timm.is_model(name))
default_cfgs = {name: default_cfg(zoo_arch(name)) for name in REGISTERED}


def _register(name: str) -> None:
    def entrypoint(pretrained: bool = False, **timm_arguments: Any) -> nn.Module:
        return create_model(name, pretrained=pretrained, **timm_arguments)

    entrypoint.__name__ = name
    register_model(entrypoint)


for _name in REGISTERED:
    _register(_name)
