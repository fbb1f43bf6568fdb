"""What README, docs and examples say is what happens: commands, code, pages.

Commands are run as they are written, page by page, on a few images, with settings at their end that make them small:
in `make test` those of the first page and the zoo, in `make prove` those of all pages in WALKS. All others, which need
a GPU, a large set or a phone, are only parsed: the command, its options and their number must exist.
"""

import importlib.util
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path

import pytest
import typer.main

import autonl
from autonl import cli
from autonl.data import digits as embedded
from autonl.data import sources
from autonl.data.memory import StoredImages
from tests.conftest import PROVE, prove
from tests.train.small import write_digits

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
WALKS = [["index.md"], ["zoo.md"], *prove([], [["images.md", "report.md"], ["search.md"], ["extending.md"]])]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))

BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`((?:autonl|make) [^`]+)`")

QUICK = [
    "data.workers=0",
    "schedule.epochs=1",
    "schedule.warmup_epochs=0",
    "data.batch_size=16",
    "loop.calibrate_batches=1",
]
SMALL = {
    "train": QUICK,
    "search": [
        *QUICK,
        "search.candidates=1",
        "search.calibrate_batches=1",
        "search.width=0.25",
        "search.resolution=32",
    ],
}


def blocks(page, language):
    return [text for name, text in BLOCK.findall(page.read_text()) if name == language]


def commands(page):
    """The lines of the shell blocks; README's have no language."""
    text = "\n".join(text for name, text in BLOCK.findall(page.read_text()) if name in ("sh", ""))
    return [shlex.split(line, comments=True) for line in text.splitlines() if line.split("#")[0].strip()]


@cache
def small_digits():
    return tuple(StoredImages(part.images[::40], part.labels[::40]) for part in embedded.digits())


@pytest.fixture(scope="module")
def flowers(tmp_path_factory):
    return write_digits(tmp_path_factory.mktemp("docs") / "flowers", 10, classes=3)


@pytest.fixture
def workspace(tmp_path, monkeypatch, flowers):
    """An empty folder with the images and files that the pages speak of."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(flowers, tmp_path / "flowers")
    (tmp_path / "few.yaml").write_text(blocks(ROOT / "docs" / "images.md", "yaml")[0])
    (tmp_path / "mine.yaml").write_text(blocks(ROOT / "docs" / "zoo.md", "yaml")[0])
    (tmp_path / "wide.yaml").write_text(blocks(ROOT / "docs" / "extending.md", "yaml")[0])
    return tmp_path


def run_command(words, monkeypatch):
    if words[0] == "autonl":
        small = [word for setting in SMALL.get(words[1], []) for word in ("--set", setting)]
        monkeypatch.setattr(sys, "argv", [*words, *small])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        assert not stop.value.code, words
    elif words[0] == "make":
        subprocess.run(["make", "-n", *words[1:]], cwd=ROOT, check=True, capture_output=True)
    elif words[:2] == ["pip", "install"]:
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        assert set(re.findall(r"[\w-]+", words[2].partition("[")[2])) <= project["optional-dependencies"].keys()
    else:
        pytest.fail(f"no rule runs {shlex.join(words)}")


@pytest.mark.parametrize("names", WALKS, ids=" ".join)
def test_the_commands_of_a_page_run(workspace, monkeypatch, names):
    monkeypatch.setattr(sources, "digits", small_digits)
    for words in (words for name in names for words in commands(ROOT / "docs" / name)):
        run_command(words, monkeypatch)


def parse(words):
    """Refuses a command, an option or a number of arguments that the command line does not have."""
    group = typer.main.get_command(cli.app)
    if words[1].startswith("-"):
        group.make_context("autonl", words[1:])
        return
    assert words[1] in group.commands, words
    group.commands[words[1]].make_context(words[1], words[2:])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_exists(page, monkeypatch):
    # a word in capitals stands for one of the reader's: a number fits everywhere
    inline = [shlex.split(re.sub(r"\b[A-Z]{2,}\d?\b", "1", text)) for text in INLINE.findall(page.read_text())]
    for words in [*commands(page), *inline]:
        if words[0] == "autonl":
            if words[1] != "--install-completion":
                parse(words)
        elif words[0] in ("python", "torchrun"):
            script = next(word for word in words if word.endswith(".py") or word.startswith("benchmarks."))
            path = script if script.endswith(".py") else script.replace(".", "/") + ".py"
            assert (ROOT / path).is_file(), words
        else:
            run_command(words, monkeypatch)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_code_of_a_page_runs(workspace, page):
    names = {"__name__": page.stem}
    for code in blocks(page, "python"):
        exec(compile(code, page.name, "exec"), names)


# -- examples --


def example(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.main


def test_example_own_folder(workspace, capsys):
    settings = [word for setting in [*SMALL["search"], "search.space=digits"] for word in ("--set", setting)]
    example("own_folder")(["flowers", "--epochs", "1", "--batch-size", "16", "--res", "32", *settings])
    assert "validation images" in capsys.readouterr().out
    assert 10_000 < (workspace / "runs/own/report.html").stat().st_size < 5_000_000


def test_example_lightnl_in_timm(workspace, capsys):
    example("lightnl_in_timm")(["mobilenetv2_035", "--steps", "2"])
    out = capsys.readouterr().out
    assert "59.3M MACs, with LightNL 63.1M" in out
    assert "outputs are the same: True" in out
    assert "17 of 17 LightNL blocks" in out


@pytest.mark.parametrize("stranger", ["notes.txt", "search/notes.txt"])
def test_make_search_deletes_no_folder_but_its_own(stranger, tmp_path, monkeypatch):
    module, out = example("digits"), tmp_path / "out"
    (out / "found").mkdir(parents=True)
    (out / "found" / "config.yaml").touch()
    (out / stranger).parent.mkdir(exist_ok=True)
    (out / stranger).touch()
    monkeypatch.setattr(sys, "argv", ["digits.py", "--out", str(out)])
    with pytest.raises(SystemExit, match="holds more than runs of this example"):
        module.main()
    assert (out / stranger).exists()
    (out / stranger).unlink()
    if stranger.startswith("search"):
        (out / "search" / "config.yaml").touch()
    module.remove_runs(out)
    assert not out.exists()


def test_every_example_has_a_test():
    tested = {"own_folder", "lightnl_in_timm", "digits"}  # digits is `make search`, which CI would wait minutes for
    assert {path.stem for path in EXAMPLES} == tested


# -- the site, the public names, the package --


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


@pytest.mark.skipif(not PROVE, reason="a clean environment takes minutes: make prove")
def test_the_wheel_in_a_clean_environment(tmp_path):
    """Wheel and sdist are built; the wheel is installed where nothing else is, and searches from an empty folder."""
    source = tmp_path / "source"
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    for name in listed.stdout.splitlines():
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, source / name)
    subprocess.run([sys.executable, "-m", "build", "--outdir", tmp_path / "dist"], cwd=source, check=True)
    wheel, sdist = next((tmp_path / "dist").glob("*.whl")), next((tmp_path / "dist").glob("*.tar.gz"))
    members = subprocess.run(["tar", "tzf", sdist], capture_output=True, text=True, check=True).stdout
    for expected in ("docs/index.md", "examples/own_folder.py", "tests/test_docs.py", "constraints.txt"):
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
