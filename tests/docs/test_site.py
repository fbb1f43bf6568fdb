"""The site, the public names, the package."""

import re
import shlex
import shutil
import subprocess
import sys
import tomllib

import pytest
import typer.main

import autonl
from autonl import cli
from tests.conftest import PROVE
from tests.docs.pages import ROOT, copy_checkout, parse


def test_the_site_is_built_without_warnings(tmp_path):
    pytest.importorskip("mkdocs", reason="needs mkdocs-material: run `make docs`")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(tmp_path / "site")]
    environment = {"NO_MKDOCS_2_WARNING": "1", "PATH": "/usr/bin:/bin"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment, check=False)
    assert (done.returncode, done.stderr.strip()) == (0, "")
    for page in (tmp_path / "site").rglob("*.html"):
        fetched = re.findall(r'<(?:script|link|img)[^>]+(?:src|href)="(https?://[^"]+)"', page.read_text())
        assert fetched == [], page


def test_the_public_names_are_all_documented():
    documented = re.findall(r"^::: autonl\.(\w+)", (ROOT / "docs" / "api.md").read_text(), re.MULTILINE)
    assert sorted([*documented, "__version__"]) == sorted(autonl.__all__)


def test_every_command_has_help_with_an_example():
    group = typer.main.get_command(cli.app)
    for name, command in group.commands.items():
        example_line = re.search(r"Example: (autonl .+)", command.help)
        assert example_line, name
        parse(shlex.split(example_line[1]))


def test_the_wheel_brings_every_file_of_the_package():
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["autonl"]
    brought = {path for pattern in patterns for path in (ROOT / "autonl").glob(pattern)}
    there = {path for path in (ROOT / "autonl").rglob("*.*") if path.is_file() and "__pycache__" not in path.parts}
    assert {path for path in there if path.suffix != ".py"} == brought


@pytest.mark.skipif(not PROVE, reason="a clean environment takes minutes: make prove")
def test_the_wheel_in_a_clean_environment(tmp_path):
    """Wheel and sdist are built; the wheel is installed where nothing else is, and searches from an empty folder."""
    source = copy_checkout(tmp_path / "source")
    subprocess.run([sys.executable, "-m", "build", "--outdir", tmp_path / "dist"], cwd=source, check=True)
    wheel, sdist = next((tmp_path / "dist").glob("*.whl")), next((tmp_path / "dist").glob("*.tar.gz"))
    members = subprocess.run(["tar", "tzf", sdist], capture_output=True, text=True, check=True).stdout
    for expected in ("docs/index.md", "examples/own_folder.py", "tests/docs/test_site.py", "constraints.txt"):
        assert expected in members
    clean = tmp_path / "clean"
    subprocess.run([sys.executable, "-m", "venv", clean], check=True)
    pip = [clean / "bin" / "pip", "install", "--quiet", "--constraint", ROOT / "constraints.txt"]
    subprocess.run([*pip, f"{wheel}[demo]"], check=True)
    empty = tmp_path / "empty"
    empty.mkdir()

    def run(*words):
        done = subprocess.run(
            [clean / "bin" / "autonl", *words], cwd=empty, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert run("--version") == f"autonl {autonl.__version__}\n"
    small = [word for setting in ("schedule.epochs=1", "search.candidates=2") for word in ("--set", setting)]
    run("search", "--data", "digits", "--space", "digits", "--recipe", "demo", *small, "--out", "runs/found")
    run("train", "runs/found", "--recipe", "demo", "--set", "schedule.epochs=1", "--out", "runs/trained")
    assert "2 runs" in run("report", "runs/found", "runs/trained")
    assert (empty / "report.html").stat().st_size < 5_000_000
    assert "autonl_l" in run("models")
    shutil.rmtree(clean)  # gigabytes
