"""A folder with what the pages speak of, and copies of the checkout."""

import shutil
import sys
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, blocks, copy_checkout, run_in
from tests.segment.small import write_set
from tests.train.small import write_digits


@pytest.fixture(scope="module")
def flowers(tmp_path_factory):
    folder = write_digits(tmp_path_factory.mktemp("docs") / "flowers", 20, classes=3)
    for number, name in enumerate(("daisy", "rose", "tulip")):
        (folder / f"class{number}").rename(folder / name)
    return folder


@pytest.fixture
def workspace(tmp_path, monkeypatch, flowers):
    """An empty folder with the images and files that the pages speak of."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(flowers, tmp_path / "flowers")
    shutil.copytree(flowers / "rose", tmp_path / "holiday")
    write_set(tmp_path / "voc", train=4, validation=2)
    for name in ("photo.jpg", "picture.jpg"):
        shutil.copy(flowers / "rose" / "000.jpg", tmp_path / name)
    (tmp_path / "mine.yaml").write_text(blocks(ROOT / "docs" / "zoo.md", "yaml")[0])
    (tmp_path / "wide.yaml").write_text(blocks(ROOT / "docs" / "extending.md", "yaml")[0])
    return tmp_path


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    return copy_checkout(tmp_path_factory.mktemp("copy") / "autonl")


@pytest.fixture(scope="module")
def checkout(copy):
    """The copy with a .venv that the Makefile has made, out of what is installed here."""
    run_in(copy, "make", ".venv/ready")
    for tool in ("ruff", "mypy", "mkdocs"):
        if (installed := Path(sys.executable).with_name(tool)).exists():
            (copy / ".venv" / "bin" / tool).symlink_to(installed)
    return copy
