"""Files of weights, read without running anything in them, into networks that fit them exactly."""

from __future__ import annotations

import os
import pickle
import zipfile
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from autonl.errors import AutoNLError
from autonl.models import Ref, create_model, read_run, run_folder
from autonl.nn.insertion import has_projection, projection_norm
from autonl.published import from_published, is_published, published_names

BEST_WEIGHTS, FINAL_WEIGHTS = "best.safetensors", "final.safetensors"  # in a run folder

SEGMENTATION = "segmentation"  # the task in run.yaml of a run folder that holds no classifier

# where training programs, this one among them, keep the weights in a file that holds more; averages first
CONTAINERS = ("average", "state_dict_ema", "ema", "module", "state_dict", "model")
PARALLEL_PREFIX = "module."  # of every name in a file saved from torch's DataParallel


def load(ref: Ref, weights: str | os.PathLike[str] | None = None, **timm_arguments: Any) -> nn.Module:
    """The network of a REF with its weights, in eval mode: those of the file, else those of the run folder.

    model = autonl.load("runs/digits-demo")
    """
    module = create_model(ref, **timm_arguments)
    load_weights(module, weights or run_weights(ref))
    return module.eval()


def run_weights(ref: Ref) -> Path:
    """The final weights of a run folder; the best so far of a run that has not ended."""
    refuse_segmentation(ref)
    folder = run_folder(ref)
    for name in (FINAL_WEIGHTS, BEST_WEIGHTS):
        if folder and (folder / name).is_file():
            return folder / name
    raise AutoNLError(f"{ref if isinstance(ref, str) else type(ref).__name__}: has no weights; give a file of weights")


def refuse_segmentation(ref: Ref) -> None:
    """The run folder of a segmentation names its backbone; its weights are of more, and of no classifier."""
    if is_segmentation(ref):
        raise AutoNLError(
            f"{ref}: holds a segmentation, which is no classifier; allowed: the run folder of a training or a search"
        )


def is_segmentation(ref: Ref) -> bool:
    folder = run_folder(ref)
    return folder is not None and read_run(folder).get("task") == SEGMENTATION


def load_weights(module: nn.Module, path: str | os.PathLike[str], *, other_classes: bool = False) -> bool:
    """Put a file's weights into the network; names and shapes must match one for one. fp16 and bf16 are cast.

    With other_classes, for fine-tuning, a classifier of another number of classes stays out; True says that it did.

    One exception: weights of a network without LightNL go into the same network with it. The BN behind a
    projection, `bn3.weight`, has then become `bn3.0.weight`, and LightNL's own weights are left as they are at
    birth: the identity, so the outputs stay exactly those of the network without it.

    Another: the PyTorch checkpoints published with the paper go in by their own names, see `autonl.published`.
    """
    tensors = read_weights(path)
    wanted = module.state_dict()
    called: dict[str, str] = {}  # our names -> those in the file
    if is_published(tensors) and hasattr(module, "blocks"):
        called, tensors = published_names(module), from_published(module, tensors)
    else:
        tensors = into_inserted(module, tensors, wanted)
    strangers = other_classifier(module, tensors, wanted) if other_classes else {}
    tensors |= strangers
    problems = [
        *(f"{called.get(name, name)} is missing" for name in wanted if name not in tensors),
        *(f"{name} is not in the network" for name in tensors if name not in wanted),
        *(
            f"{called.get(name, name)} has shape {tuple(tensor.shape)}, the network's {tuple(wanted[name].shape)}"
            for name, tensor in tensors.items()
            if name in wanted and tensor.shape != wanted[name].shape
        ),
        *(
            f"{called.get(name, name)} is of type {tensor.dtype}, the network's of {wanted[name].dtype}"
            for name, tensor in tensors.items()
            if name in wanted and tensor.is_floating_point() != wanted[name].is_floating_point()
        ),
    ]
    if problems:
        more = f" (and {len(problems) - 3} more)" if len(problems) > 3 else ""
        raise AutoNLError(f"{path}: does not fit the network: {'; '.join(problems[:3])}{more}")
    module.load_state_dict(tensors)
    return bool(strangers)


def other_classifier(module: Any, tensors: dict[str, Tensor], wanted: dict[str, Tensor]) -> dict[str, Tensor]:
    """The network's own classifier, if the file's is for another number of classes."""
    names = [f"{module.default_cfg['classifier']}.{kind}" for kind in ("weight", "bias")]
    differ = [name for name in names if name in tensors and len(tensors[name]) != len(wanted.get(name, ()))]
    return {name: wanted[name] for name in names if name in wanted} if differ else {}


def into_inserted(module: nn.Module, tensors: dict[str, Tensor], wanted: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors under the names of a network with non-local blocks, if they are of one without."""
    norms = [
        f"{name}.{projection_norm(block)}."
        for name, block in module.named_modules()
        if has_projection(block) and isinstance(getattr(block, projection_norm(block)), nn.Sequential)
    ]
    renamed = {
        norm + entry: norm + "0." + entry
        for norm in norms
        for entry in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    }
    if not any(old in tensors for old in renamed):
        return tensors
    at_birth = {name: wanted[name] for name in wanted for norm in norms if name.startswith(norm + "1.")}
    return at_birth | {renamed.get(name, name): tensor for name, tensor in tensors.items()}


def read_weights(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """Names and tensors in a .safetensors file, or in a state_dict file read with weights_only=True."""
    path = Path(path)
    try:
        content = load_file(path) if path.suffix == ".safetensors" else torch.load(path, "cpu", weights_only=True)
    except OSError as error:
        raise AutoNLError(f"{path}: cannot be read: {error.strerror or error}") from None
    except pickle.UnpicklingError:
        raise AutoNLError(f"{path}: refused: it holds more than tensors and plain values, or is no weights") from None
    except (SafetensorError, zipfile.BadZipFile, RuntimeError, EOFError, LookupError, ValueError) as error:
        raise AutoNLError(f"{path}: not a file of weights: {' '.join(str(error).split())[:120]}") from None
    found = [content[name] for name in CONTAINERS if name in content] if isinstance(content, dict) else []
    weights, *others = [tensors for held in (*found, content) if (tensors := plain_tensors(held))] or [{}]
    if not weights:
        raise AutoNLError(f"{path}: not a file of weights; allowed: safetensors, or a state_dict saved by torch")
    for other in others:  # an average may leave out what cannot be averaged, BN's counters for one
        weights = other | weights if weights.keys() < other.keys() else weights
    return weights


def plain_tensors(held: Any) -> dict[str, Tensor]:
    """Names and tensors of a state_dict, or of the averages that training programs keep in a "shadow"; else nothing."""
    held = held["shadow"] if isinstance(held, dict) and isinstance(held.get("shadow"), dict) else held
    if not isinstance(held, dict) or not all(isinstance(name, str) and is_plain(t) for name, t in held.items()):
        return {}
    prefixed = all(name.startswith(PARALLEL_PREFIX) for name in held)
    return {name.removeprefix(PARALLEL_PREFIX): t for name, t in held.items()} if prefixed else held


def is_plain(value: Any) -> bool:
    """A tensor with all its values."""
    return isinstance(value, Tensor) and value.layout == torch.strided and not value.is_meta
