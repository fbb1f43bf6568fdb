"""What a run folder holds, however much of it: every file is read on its own, and a line says what is not there."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from autonl.arch.codec import read_arch
from autonl.arch.macs import LayerCost, layer_costs
from autonl.arch.spec import ArchSpec
from autonl.errors import AutoNLError, shown
from autonl.models import ARCH_FILE, RUN_FILE, TIMM_PREFIX
from autonl.profile import profile
from autonl.report.charts import number
from autonl.report.searches import SearchRecord, search_record
from autonl.train.folder import CLASSES_FILE, CONFIG_FILE, IOU_FILE, OVERLAYS_FILE, SEARCH_FILE, flat
from autonl.train.loop import RESULT_FILE
from autonl.train.records import METRICS_FILE
from autonl.version import __version__

FILES = (ARCH_FILE, RUN_FILE, CONFIG_FILE, METRICS_FILE, RESULT_FILE, CLASSES_FILE, SEARCH_FILE)

MAX_BYTES = 32 << 20
MAX_PICTURE = 2_000_000  # bytes: the page stays below 5 MB


@dataclass
class Run:
    folder: Path
    name: str  # the folder as it was given
    about: dict[str, Any] = field(default_factory=dict)  # REF, command, seed, versions, hardware
    settings: dict[str, Any] = field(default_factory=dict)  # by their dotted names
    spec: ArchSpec | None = None
    layers: list[LayerCost] = field(default_factory=list)
    macs: int | None = None
    params: int | None = None
    history: list[dict[str, float]] = field(default_factory=list)  # a row an epoch; cells that are no numbers left out
    result: dict[str, float] = field(default_factory=dict)
    classes: list[str] = field(default_factory=list)
    search: SearchRecord | None = None
    kind: str = "training"  # search, segmentation
    iou: list[tuple[str, float | None]] = field(default_factory=list)  # of a segmentation, class by class
    overlays: bytes = b""  # PNG of a segmentation: images with what was found in them
    notes: list[str] = field(default_factory=list)  # what is missing, damaged or from another version

    @property
    def is_search(self) -> bool:
        return self.kind == "search"

    @property
    def ended(self) -> bool:
        return bool(self.result)

    def note(self, text: str) -> None:
        self.notes.append(" ".join(text.split())[:400])


def read_run(folder: Path) -> Run:
    """Everything that can be read of a run folder; refused is only what is no run folder at all."""
    if not folder.is_dir():
        raise AutoNLError(f"{folder}: no such run folder")
    if not any((folder / name).exists() for name in FILES):
        raise AutoNLError(f"{folder}: not a run folder; one holds {', '.join(FILES[:-1])} or some of them")
    run = Run(folder, str(folder))
    run.about = read(run, RUN_FILE, mapping_from_yaml, "command, seed, versions and hardware are not known") or {}
    run.settings = flat(read(run, CONFIG_FILE, mapping_from_yaml, "its settings are not known") or {})
    run.history = read(run, METRICS_FILE, rows_from_csv, "there are no curves") or []
    run.classes = read(run, CLASSES_FILE, str.splitlines, "classes are shown by their number") or []
    run.kind = kind_of(run)
    run.result = read(run, RESULT_FILE, numbers_from_json, "the run has not ended, or was stopped") or {}
    if run.is_search:
        run.search = read(run, SEARCH_FILE, search_record, "gates and rival networks are not known")
    if run.search and run.search.rivals:  # the final evaluation is of what the gates decided, before the landing
        best = run.search.rivals[0]
        run.result |= {"top1": best.top1} | ({"val_loss": best.loss} if best.loss is not None else {})
    if run.kind == "segmentation":
        run.iou = read(run, IOU_FILE, classes_from_csv, "the IoU of the classes is not known") or []
        picture = folder / OVERLAYS_FILE
        run.overlays = picture.read_bytes() if picture.is_file() and picture.stat().st_size < MAX_PICTURE else b""
    read_architecture(run)
    writer = run.about.get("versions", {}).get("autonl") if isinstance(run.about.get("versions"), dict) else None
    if run.about and writer != __version__:
        told = f"autonl {shown(writer)}" if writer else "an unknown version of autonl"
        run.note(f"{RUN_FILE}: was written by {told}, this is {__version__}: what it did not know is missing below")
    return run


def kind_of(run: Run) -> str:
    sections = {name.split(".")[0] for name in run.settings}
    if "search" in sections or (run.folder / SEARCH_FILE).exists():
        return "search"
    return "segmentation" if "segment" in sections or run.about.get("task") == "segmentation" else "training"


def read(run: Run, name: str, parse: Callable[[str], Any], without: str) -> Any:
    """A file of the folder, parsed; None and a note where it is missing or makes no sense."""
    path = run.folder / name
    if not path.exists():
        run.note(f"{name}: missing; {without}")
        return None
    try:
        return parse(text_of(path))
    except AutoNLError as error:
        run.note(f"{name}: {error}; {without}")
    except (OSError, ValueError, yaml.YAMLError, csv.Error, RecursionError, KeyError, TypeError) as error:
        reason = " ".join(str(error).split())[:150]
        run.note(f"{name}: damaged ({type(error).__name__}: {reason}); {without}")
    return None


def text_of(path: Path) -> str:
    if not path.is_file():
        raise AutoNLError("not a file")  # a pipe would wait for a writer
    with open(path, "rb") as file:
        content = file.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise AutoNLError(f"too large; allowed: up to {MAX_BYTES >> 20} MiB")
    return content.decode("utf-8")


def mapping_from_yaml(text: str) -> dict[str, Any]:
    content = yaml.safe_load(text)
    if not isinstance(content, dict):
        raise AutoNLError("not a mapping of names to values")
    return {str(name): value for name, value in content.items()}


def rows_from_csv(text: str) -> list[dict[str, float]]:
    rows = []
    for row in csv.DictReader(io.StringIO(text)):
        numbers = {str(name): number(value) for name, value in row.items() if name}
        kept = {name: value for name, value in numbers.items() if value is not None}
        if "epoch" in kept:  # a row without one stands nowhere; the last line of a torn file may be such
            rows.append(kept)
    if not rows:
        raise AutoNLError("holds no row with an epoch")
    return rows


def classes_from_csv(text: str) -> list[tuple[str, float | None]]:
    return [(row["class"], number(row["iou"])) for row in csv.DictReader(io.StringIO(text))]


def numbers_from_json(text: str) -> dict[str, float]:
    content = json.loads(text)
    if not isinstance(content, dict):
        raise AutoNLError("not a JSON object")
    numbers = {name: number(value) for name, value in content.items() if not isinstance(value, bool)}
    return {name: value for name, value in numbers.items() if value is not None}


def read_architecture(run: Run) -> None:
    """The architecture and its cost; of a network of timm's, the cost."""
    path = run.folder / ARCH_FILE
    ref = run.about.get("ref")
    if path.exists():
        try:
            run.spec = read_arch(path)
            run.layers = layer_costs(run.spec)
            run.macs, run.params = (sum(getattr(layer, kind) for layer in run.layers) for kind in ("macs", "params"))
        except AutoNLError as error:
            run.note(str(error).removeprefix(f"{run.folder}/"))
    elif isinstance(ref, str) and ref.startswith(TIMM_PREFIX):
        try:
            size = run.settings.get("data.image_size")
            cost = profile(run.folder.absolute(), (size, size) if isinstance(size, int) else None)
            run.macs, run.params = cost.macs, cost.params
        except AutoNLError as error:
            run.note(str(error))
    else:
        run.note(f"{ARCH_FILE}: missing; the network cannot be drawn")
