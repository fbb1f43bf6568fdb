"""README and docs as the tests read them, and a copy of the checkout to run things in."""

import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from functools import cache
from pathlib import Path

import typer.main

from autonl import cli
from autonl.data import digits as embedded
from autonl.data.memory import StoredImages

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PROGRAM = r"(?:autonl|make|python|pip|torchrun) "
# a program and a word behind it, whatever program it is; or a file to source, or a variable to set
COMMAND = re.compile(r"(?:[a-z][\w-]*|\.|[A-Z_]+=\S*)\s")

QUICK = [
    "data.workers=0",
    "schedule.epochs=1",
    "schedule.warmup_epochs=0",
    "data.batch_size=16",
    "loop.calibrate_batches=1",
]
SMALL = {
    "train": QUICK,
    "segment": [*QUICK, "data.batch_size=4", "data.image_size=32", "segment.pictures=1"],
    "search": [
        *QUICK,
        "search.candidates=1",
        "search.trials=2",
        "search.trial_epochs=1",
        "search.calibrate_batches=1",
        "search.space=digits",
        "search.width=0.25",
        "search.resolution=32",
    ],
}


def blocks(page, language):
    return [text for name, text in BLOCK.findall(page.read_text()) if name == language]


def commands(page):
    """The lines of the shell blocks, README's have no language, and the commands among what a program printed."""
    text = page.read_text()
    shell = [line for name, block in BLOCK.findall(text) if name in ("sh", "bash", "") for line in block.splitlines()]
    shown = [line for name, block in BLOCK.findall(text) if name == "text" for line in block.splitlines()]
    lines = [*shell, *(line for line in shown if re.match(PROGRAM, line))]
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def mentioned(page):
    """The commands in the sentences and tables of a page."""
    spans = re.findall("`([^`]+)`", BLOCK.sub("", page.read_text()))
    return [shlex.split(span) for span in spans if COMMAND.match(span)]


def parse(words):
    """Refuses a command, an option or a number of arguments that the command line does not have."""
    group = typer.main.get_command(cli.app)
    if words[1].startswith("-"):
        group.make_context("autonl", words[1:])
        return
    assert words[1] in group.commands, words
    group.commands[words[1]].make_context(words[1], words[2:])


@cache
def small_digits(step=40):
    return tuple(StoredImages(part.images[::step], part.labels[::step]) for part in embedded.digits())


def copy_checkout(folder):
    """The files of the checkout as they are now, committed or not."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    for name in listed.stdout.splitlines():
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    return folder


def run_in(folder, *words, status=0, **variables):
    """A command in a copied checkout, without our own settings and without a package index."""
    ours = ("PYTEST_", "AUTONL_", "MAKE")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(ours)} | {
        "PYTHON": sys.executable,
        "PYTHONPATH": sysconfig.get_path("purelib"),
        "PIP_NO_INDEX": "1",
        "PIP_NO_BUILD_ISOLATION": "0",  # pip reads this as the value of build isolation
    }
    done = subprocess.run(
        words, cwd=folder, env=environment | variables, capture_output=True, text=True, timeout=1800, check=False
    )
    said = f"{shlex.join(map(str, words))}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
    assert done.returncode in (0, status), said
    return done
