"""ArchSpec <-> arch.yaml, BlockSpec <-> block string. Strict: what is not understood is refused by name.

A block string is `k5_s2_e6_c40_se0.5_nl0.25/1`: kernel, stride, expansion, output channels, SE ratio,
LightNL ratio / stride. The first four are required.
"""

from __future__ import annotations

import os
import re
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import yaml

from autonl.arch.macs import count_macs, count_params
from autonl.arch.spec import ArchSpec, BlockSpec, LightNLSpec, check_resolution
from autonl.errors import AutoNLError, refuse, refuse_name, shown

MAX_FILE_BYTES = 1 << 20

# arch.yaml's word -> ArchSpec's field, in the order they are written
KEYS = {
    "name": "name",
    "resolution": "resolution",
    "classes": "classes",
    "stem": "stem_chs",
    "head": "head_chs",
    "activation": "activation",
    "bn_eps": "bn_eps",
    "bn_momentum": "bn_momentum",
    "dropout": "dropout",
    "operator": "operator",
    "blocks": "blocks",
}
DECLARED = ("macs", "params")  # optional figures, checked against the recomputed ones
DEFAULTS = {f.name: f.default for f in fields(ArchSpec) if f.default is not MISSING}

_NUMBER = r"\d{1,20}(?:\.\d{1,20})?(?:e-\d{1,3})?"
_TOKEN = re.compile(rf"(nl|se|[ksec])({_NUMBER})(?:/(\d{{1,9}}))?", re.ASCII)
_BLOCK_FORM = "k<kernel>_s<stride>_e<expand>_c<channels>, then _se<ratio> and _nl<ratio>/<stride> where wanted"


def block_to_string(block: BlockSpec) -> str:
    text = f"k{block.kernel}_s{block.stride}_e{block.expand}_c{block.out_chs}"
    if block.se:
        text += f"_se{_number(block.se)}"
    if block.lightnl:
        text += f"_nl{_number(block.lightnl.ratio)}/{block.lightnl.stride}"
    return text


def block_from_string(text: object) -> BlockSpec:
    if not isinstance(text, str):
        refuse("block", text, _BLOCK_FORM)
    found: dict[str, str] = {}
    nonlocal_stride = 0
    for token in text.split("_"):
        match = _TOKEN.fullmatch(token)
        if not match or (match[3] is None) == (match[1] == "nl"):
            raise AutoNLError(f"block {shown(text)}: unknown token {shown(token)}; allowed: {_BLOCK_FORM}")
        if match[1] in found:
            raise AutoNLError(f"block {shown(text)}: {match[1]} is given twice; allowed: {_BLOCK_FORM}")
        found[match[1]] = match[2]
        if match[3] is not None:
            nonlocal_stride = int(match[3])
    missing = [key for key in ("k", "s", "e", "c") if key not in found]
    if missing:
        raise AutoNLError(f"block {shown(text)}: {', '.join(missing)} is missing; allowed: {_BLOCK_FORM}")
    kernel, stride, expand, out_chs = (_value(found[key]) for key in ("k", "s", "e", "c"))
    se = float(found.get("se", 0))
    lightnl = LightNLSpec(float(found["nl"]), nonlocal_stride) if "nl" in found else None
    return BlockSpec(kernel, stride, expand, out_chs, se, lightnl)


def spec_to_dict(spec: ArchSpec) -> dict[str, Any]:
    """The content of arch.yaml: plain values, what equals its default left out, figures declared."""
    content = {
        key: getattr(spec, field)
        for key, field in KEYS.items()
        if key != "blocks" and getattr(spec, field) != DEFAULTS.get(field)
    }
    if "resolution" in content:
        content["resolution"] = resolution_to_text(spec.resolution)
    content["macs"] = count_macs(spec)
    content["params"] = count_params(spec)
    content["blocks"] = [block_to_string(block) for block in spec.blocks]
    return content


def spec_from_dict(content: object) -> ArchSpec:
    if not isinstance(content, dict):
        refuse("architecture", type(content).__name__, f"a mapping with {', '.join(KEYS)}")
    for key in content:
        if key not in KEYS and key not in DECLARED:
            refuse_name("field", key, (*KEYS, *DECLARED))
    for key in ("name", "blocks"):
        if key not in content:
            raise AutoNLError(f"the field {key} is missing; required: name, blocks")
    values: dict[str, Any] = {KEYS[key]: value for key, value in content.items() if key in KEYS}
    if "resolution" in values:
        values["resolution"] = resolution_from(values["resolution"])
    if not isinstance(values["blocks"], list):
        refuse("blocks", values["blocks"], "a list of block strings")
    values["blocks"] = tuple(_block_at(index, text) for index, text in enumerate(values["blocks"]))
    spec = ArchSpec(**values)
    for key, count in (("macs", count_macs), ("params", count_params)):
        if key in content and (type(content[key]) is not int or content[key] != count(spec)):
            refuse(key, content[key], f"{count(spec)}, the figure recomputed from the blocks")
    return spec


def read_arch(path: str | os.PathLike[str]) -> ArchSpec:
    """The architecture in a YAML file; an error names the file, the field, the value and what is allowed."""
    try:
        if os.path.exists(path) and not os.path.isfile(path):
            raise AutoNLError("not a file")  # a pipe would wait for a writer
        with open(path, "rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
        if len(data) > MAX_FILE_BYTES:
            raise AutoNLError(f"too large for an architecture; allowed: up to {MAX_FILE_BYTES} bytes")
        return spec_from_dict(yaml.load(data.decode(), Loader=ArchLoader))
    except AutoNLError as error:
        raise AutoNLError(f"{path}: {error}") from None
    except OSError as error:
        raise AutoNLError(f"{path}: cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise AutoNLError(f"{path}: not a YAML file: {' '.join(str(error).split())[:200]}") from None


def write_arch(spec: ArchSpec, path: str | os.PathLike[str]) -> None:
    Path(path).write_text(to_yaml(spec_to_dict(spec)), encoding="utf-8")


def resolution_from(value: object, name: str = "resolution") -> tuple[int, int]:
    """(height, width) from 224, "224" or "320x224"; name: what a refusal calls it."""
    sides = re.fullmatch(r"(\d{1,9})(?:x(\d{1,9}))?", str(value), re.ASCII)
    if type(value) not in (int, str) or not sides:
        refuse(name, value, "a size such as 224, or HEIGHTxWIDTH such as 320x224")
    resolution = int(sides[1]), int(sides[2] or sides[1])
    check_resolution(name, resolution)
    return resolution


def resolution_to_text(resolution: tuple[int, int]) -> int | str:
    height, width = resolution
    return height if height == width else f"{height}x{width}"


def _block_at(index: int, text: object) -> BlockSpec:
    try:
        return block_from_string(text)
    except AutoNLError as error:
        raise AutoNLError(f"blocks[{index}]: {error}") from None


def _number(value: float) -> str:
    return repr(int(value)) if value == int(value) else repr(value)


def _value(text: str) -> Any:
    # a number that should be whole and is not goes on to BlockSpec, which refuses it by its field
    return int(text) if text.isdigit() else float(text)


def to_yaml(content: Any) -> str:
    """Text from which both loaders read the content again."""
    return yaml.dump(content, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


class StrictLoader(yaml.SafeLoader):
    """SafeLoader that refuses a key given twice instead of keeping the last one."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node: yaml.MappingNode = super().compose_mapping_node(anchor)  # as written: merges (<<) come later
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise AutoNLError(f"the field {shown(key.value)} is given twice; allowed: once")
                seen.add(key.value)
        return node


class ArchLoader(StrictLoader):
    """Takes 1e-3 for a number, as people mean it; YAML 1.1 reads it as text for want of a point."""


EXPONENT = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+", re.ASCII)
ArchLoader.add_implicit_resolver("tag:yaml.org,2002:float", EXPONENT, list("-+.0123456789"))


class _Dumper(yaml.SafeDumper):
    """Quotes what ArchLoader would not read as text: a network called 1e5."""

    yaml_implicit_resolvers = ArchLoader.yaml_implicit_resolvers
