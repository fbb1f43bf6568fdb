"""Settings of a training: frozen, typed, read strictly from a recipe and `--set section.name=value`."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

import yaml

from autonl.arch.codec import EXPONENT, StrictLoader
from autonl.data.config import AugmentConfig, DataConfig, at_least, between
from autonl.errors import AutoNLError, refuse, refuse_name

PRECISIONS = ("auto", "32", "bf16-mixed")


@dataclass(frozen=True)
class OptimConfig:
    name: str = "sgd"  # any optimiser of timm's
    lr: float = 0.1
    momentum: float = 0.9
    weight_decay: float = 1e-5  # not on biases and BN
    arguments: dict[str, Any] = field(default_factory=dict)  # further ones of that optimiser
    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        at_least("optim.lr", self.lr, 0)
        between("optim.momentum", self.momentum, 0, 1)
        at_least("optim.weight_decay", self.weight_decay, 0)
        between("optim.label_smoothing", self.label_smoothing, 0, 0.99)


@dataclass(frozen=True)
class ScheduleConfig:
    """The learning rate, changed after every optimiser step; all lengths in epochs."""

    name: str = "cosine"  # cosine, step, poly, tanh: timm's
    epochs: int = 30
    warmup_epochs: float = 0.0
    warmup_lr: float = 0.0
    min_lr: float = 0.0
    decay_epochs: float = 2.4  # step: times decay_rate every so many epochs
    decay_rate: float = 0.97

    def __post_init__(self) -> None:
        if self.name not in ("cosine", "step", "poly", "tanh"):
            refuse("schedule.name", self.name, "cosine, step, poly, tanh")
        at_least("schedule.epochs", self.epochs, 1)
        if not 0 <= self.warmup_epochs <= self.epochs:
            allowed = f"a number from 0 to {self.epochs}, which is schedule.epochs"
            refuse("schedule.warmup_epochs", self.warmup_epochs, allowed)
        at_least("schedule.decay_epochs", self.decay_epochs, 1e-6)
        for name in ("warmup_lr", "min_lr", "decay_rate"):
            at_least(f"schedule.{name}", getattr(self, name), 0)


@dataclass(frozen=True)
class LoopConfig:
    precision: str = "auto"  # auto: bf16-mixed on a GPU, 32 on a CPU
    channels_last: bool = True
    compile: bool = False  # torch.compile: pays on long runs, costs minutes at the start
    graph: bool = True  # record the passes as CUDA graphs where they can be: see train/graphs.py
    kernels: bool = False  # our own kernels on a GPU, in a search for its trials: see docs/speed.md for when it pays
    accumulate: int = 1  # rounds of forward and backward an optimiser step
    clip_norm: float | None = None  # largest norm of all gradients together
    ema: float | None = None  # decay of the average of the weights; None: no average
    ema_warmup: bool = False  # let the decay grow to that value, for short runs
    calibrate_batches: int = 0  # batches that the BN statistics are taken from anew before the final evaluation
    evaluate_epochs: int = 1  # evaluate after every so many epochs
    checkpoint_epochs: int = 1
    checkpoint_steps: int = 0  # and after so many steps inside an epoch; 0: none
    log_steps: int = 20  # steps between two looks at the loss, each of which waits for the device
    patience: int = 0  # stop early after so many evaluations without a new best; 0: never

    def __post_init__(self) -> None:
        if self.precision not in PRECISIONS:
            refuse("loop.precision", self.precision, ", ".join(PRECISIONS))
        between("loop.ema", self.ema, 0, 1)
        at_least("loop.clip_norm", self.clip_norm, 1e-9)
        for name in ("accumulate", "evaluate_epochs", "checkpoint_epochs", "log_steps"):
            at_least(f"loop.{name}", getattr(self, name), 1)
        for name in ("calibrate_batches", "checkpoint_steps", "patience"):
            at_least(f"loop.{name}", getattr(self, name), 0)


@dataclass(frozen=True)
class Config:
    seed: int = 0
    model: dict[str, Any] = field(default_factory=dict)  # timm's arguments: drop_rate, pad_type ...
    data: DataConfig = field(default_factory=DataConfig)
    augment: AugmentConfig = field(default_factory=AugmentConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    loop: LoopConfig = field(default_factory=LoopConfig)

    def __post_init__(self) -> None:
        between("seed", self.seed, 0, 2**63 - 1)


Section = TypeVar("Section")
RECIPES = tuple(sorted(p.name.removesuffix(".yaml") for p in (resources.files(__package__) / "recipes").iterdir()))
FOR_SEGMENTATION = ("voc",)


def load_config(recipe: str | None, settings: Iterable[str] = (), kind: type[Section] = Config) -> Section:  # type: ignore[assignment]
    """A recipe (a shipped name or a .yaml file; None: the defaults) with `section.name=value` settings on top."""
    content = read_recipe(recipe, kind) if recipe else {}
    fault = fault_of(content, kind)
    try:
        return changed_config(content, settings, kind)
    except AutoNLError as error:
        raise AutoNLError(f"{recipe}: {error}" if str(error) == fault else str(error)) from None


def fault_of(content: dict[str, Any], kind: type) -> str | None:
    """What is wrong with a recipe by itself; a setting on top may still mend it."""
    try:
        from_dict(kind, content)
    except AutoNLError as error:
        return str(error)
    return None


def changed_config(content: dict[str, Any], settings: Iterable[str], kind: type[Section]) -> Section:
    """The content of a recipe with `section.name=value` settings on top."""
    for setting in settings:
        apply_setting(content, setting, kind)
    return from_dict(kind, content)


def read_recipe(recipe: str, kind: type) -> dict[str, Any]:
    fitting = [name for name in RECIPES if name not in FOR_SEGMENTATION or "segment" in get_type_hints(kind)]
    if recipe in fitting:
        return read_yaml(resources.files(__package__) / "recipes" / f"{recipe}.yaml")
    if recipe in FOR_SEGMENTATION:
        raise AutoNLError(f"{recipe!r} is a recipe for autonl segment; allowed: {', '.join(fitting)}, or a .yaml file")
    if not recipe.endswith((".yaml", ".yml")):
        refuse_name("recipe (or .yaml file)", recipe, fitting)
    return read_yaml(Path(recipe))


def read_yaml(path: Any) -> dict[str, Any]:
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), Loader=StrictLoader)
    except AutoNLError as error:
        raise AutoNLError(f"{path}: {error}") from None
    except OSError as error:
        raise AutoNLError(f"{path}: cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise AutoNLError(f"{path}: not a YAML file: {' '.join(str(error).split())[:200]}") from None
    if not isinstance(content, dict):
        refuse(str(path), content, "a YAML mapping of settings")
    return content


def apply_setting(content: dict[str, Any], setting: str, kind: type) -> None:
    """Put `section.name=value` into the content; the value is read as YAML."""
    name, equals, text = setting.partition("=")
    *sections, last = name.split(".")
    if not equals or not last:
        refuse("--set", setting, "section.name=value")
    known = setting_names(kind)
    if not any(f"{name}.".startswith(f"{setting}.") for setting in known):
        refuse_name("setting", name, known)
    try:
        value = yaml.load(text, Loader=StrictLoader)
    except AutoNLError as error:
        raise AutoNLError(f"--set {name}: {error}") from None
    except (yaml.YAMLError, ValueError, RecursionError):  # ValueError: a day that no month has
        refuse("--set", setting, "section.name=value with a value in YAML")
    place = content
    for section in sections:
        if place.get(section) is None:  # absent, or a heading in the recipe with nothing below it
            place[section] = {}
        place = place[section]
        if not isinstance(place, dict):
            if name in known:  # a heading of the recipe with something else below it
                refuse(section, place, "a mapping of settings")
            refuse_name("setting", name, known)
    place[last] = value


def setting_names(kind: type, prefix: str = "") -> list[str]:
    """The dotted names of all settings."""
    names = []
    for name, hint in get_type_hints(kind).items():
        names += setting_names(hint, f"{prefix}{name}.") if is_dataclass(hint) else [prefix + name]  # type: ignore[arg-type]
    return names


def from_dict(kind: type[Section], content: object, prefix: str = "", known: Iterable[str] = ()) -> Section:
    """A section, and those inside it, from plain values; an unknown name or a wrong type is refused."""
    known = known or setting_names(kind)
    content = {} if content is None else content
    if not isinstance(content, Mapping):
        refuse(prefix.rstrip(".") or "settings", content, "a mapping of settings")
    hints = get_type_hints(kind)
    values = {}
    for name, value in content.items():
        if name not in hints:
            refuse_name("setting", f"{prefix}{name}", known)
        hint = hints[name]
        section = is_dataclass(hint)
        values[name] = (
            from_dict(hint, value, f"{prefix}{name}.", known) if section else convert(value, hint, prefix + name)
        )
    own: Any = kind
    required = [f.name for f in fields(own) if f.default is MISSING and f.default_factory is MISSING]
    for name in required:
        if name not in values:
            raise AutoNLError(f"the field {prefix}{name} is missing; required: {', '.join(required)}")
    return kind(**values)


def to_dict(config: Any) -> dict[str, Any]:
    """Plain values: what YAML and a checkpoint hold."""
    return {
        f.name: to_dict(value) if is_dataclass(value) else list(value) if isinstance(value, tuple) else value
        for f in fields(config)
        for value in [getattr(config, f.name)]
    }


def convert(value: Any, hint: Any, name: str) -> Any:
    """The value as the type that its setting has; only what is meant the same is converted."""
    if get_origin(hint) in (types.UnionType, Union):  # X | None
        return None if value is None else convert(value, get_args(hint)[0], name)
    if get_origin(hint) is tuple:
        return convert_tuple(value, get_args(hint), name)
    if get_origin(hint) is dict:
        if isinstance(value, dict) and all(isinstance(key, str) for key in value):
            try:
                return with_numbers(value)
            except RecursionError:  # *name of YAML may stand inside what it names
                refuse(name, "...", "values that are not part of themselves")
        refuse(name, value, "a mapping of names to values")
    if hint is float:
        return convert_float(value, name)
    if type(value) is hint:  # not isinstance(): True is an int to Python
        return value
    if hint is str and type(value) in (int, float):
        return str(value)
    refuse(name, value, {int: "a whole number", bool: "true or false", str: "text"}[hint])


def with_numbers(value: Any) -> Any:
    """A value whose type no setting tells: text such as 1e-3 is meant for a number there."""
    if isinstance(value, list):
        return [with_numbers(item) for item in value]
    if isinstance(value, dict):
        return {key: with_numbers(item) for key, item in value.items()}
    return float(value) if isinstance(value, str) and EXPONENT.fullmatch(value) else value


def convert_float(value: Any, name: str) -> float:
    if type(value) in (int, float, str):
        try:
            return float(value)  # YAML reads 1e-5 as text
        except ValueError:
            pass
    refuse(name, value, "a number")


def convert_tuple(value: Any, hints: tuple[Any, ...], name: str) -> tuple[Any, ...]:
    count = None if hints[-1] is Ellipsis else len(hints)
    if not isinstance(value, list | tuple) or (count is not None and len(value) != count):
        refuse(name, value, f"a list of {'numbers' if count is None else f'{count} numbers'}, such as [0.5, 0.5, 0.5]")
    return tuple(convert(item, hints[0], name) for item in value)


def replace(config: Section, **sections: Any) -> Section:
    """The config with settings changed: `replace(config, data={"path": "x"}, seed=1)`."""
    changed = {
        name: dataclasses.replace(getattr(config, name), **new) if is_dataclass(getattr(config, name)) else new
        for name, new in sections.items()
    }
    return dataclasses.replace(config, **changed)  # type: ignore[type-var]
