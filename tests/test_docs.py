"""What README, docs and examples say is what happens: commands, code, pages.

Commands are run as they are written, page by page, in a folder that holds the images and files that the pages speak of,
with settings at their end that make them small: in `make test` those of README and of the zoo, in `make prove` those of
all pages. What a page says in passing is run too, with the reader's words (DIR, NAME) replaced.
Not run: what installs (its extras must exist), `make` (its targets must), benchmarks, which want a GPU and hours (they
must print their help), and what other programs do (torchrun).
"""

import importlib.util
import itertools
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import tomllib
from functools import cache, partial
from pathlib import Path

import pytest
import timm
import torch
import typer.main
from safetensors.torch import save_file

import autonl
from autonl import cli
from autonl.data import digits as embedded
from autonl.data import sources
from autonl.data.memory import StoredImages
from autonl.train.config import load_config
from tests.conftest import PROVE
from tests.segment.small import write_set
from tests.train.small import write_digits

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PATHS = {page.name: page for page in PAGES}
CHEAP = ["README.md", "zoo.md"]
# pages whose commands go on with what those of another page made
WALKS = [["images.md", "report.md"], *([page.name] for page in PAGES if page.name not in ("images.md", "report.md"))]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))

BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PROGRAM = r"(?:autonl|make|python|pip|torchrun) "
INLINE = re.compile(rf"`({PROGRAM}[^`]+)`")
# what the reader puts in
MEANT = {"DIR": "flowers", "VOC_ROOT": "voc", "NAME": "autonl_l", "REF": "runs/trained", "IMAGE": "photo.jpg"}

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
FEWER = {"measure": ["--rounds", "1", "--width", "0.25"]}  # of the space that SMALL searches


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
    return [shlex.split(text) for text in INLINE.findall(BLOCK.sub("", page.read_text()))]


@cache
def small_digits(step=40):
    return tuple(StoredImages(part.images[::step], part.labels[::step]) for part in embedded.digits())


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


def make_what_is_spoken_of(words, monkeypatch):
    """Runs and files of the reader's that a command takes and that no command of its page makes."""
    taken = [word for name, word in itertools.pairwise(words) if name not in ("--out", "--label")]
    if "model.safetensors" in taken:
        save_file(timm.create_model("mobilenetv2_100").state_dict(), "model.safetensors")
    for run in ("runs/trained", "runs/other"):
        if run in taken and not Path(run).exists():
            # large enough for pixel 150,80, with LightNL in all blocks, and more than 20 images held out
            settings = "--set data.image_size=160 --set data.held_out=0.5"
            network = f"autonl train mobilenetv2_lightnl_035 --data flowers {settings} --out {run}"
            run_command(shlex.split(network), monkeypatch)


def run_command(words, monkeypatch):
    words = [MEANT.get(word, word) for word in words]
    if words[0] == "autonl":
        make_what_is_spoken_of(words, monkeypatch)
        small = [word for setting in SMALL.get(words[1], []) for word in ("--set", setting)]
        monkeypatch.setattr(sys, "argv", [*words, *small, *FEWER.get(words[1], [])])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        assert not stop.value.code, words
    elif words[0] == "make":
        subprocess.run(["make", "-n", *words[1:]], cwd=ROOT, check=True, capture_output=True)
    elif words[:2] == ["pip", "install"]:
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        extras = re.findall(r"[\w-]+", " ".join(words[2:]).partition("[")[2])
        assert set(extras) <= project["optional-dependencies"].keys(), words
    elif words[:2] == ["python", "-m"]:
        run_module(words[2])
    elif words[0] == "python":
        run_script(words[1], words[2:], monkeypatch)
    else:
        pytest.fail(f"no rule runs {shlex.join(words)}")


def run_module(name):
    """A benchmark says what it takes, or where it takes nothing can be imported."""
    assert (ROOT / name.replace(".", "/")).with_suffix(".py").is_file() or (ROOT / name.replace(".", "/")).is_dir()
    code = f"import runpy, sys; sys.argv = [{name!r}, '--help']; runpy.run_module({name!r}, run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "usage:" in done.stdout


def run_script(name, arguments, monkeypatch):
    path = Path(name) if Path(name).is_file() else ROOT / name
    monkeypatch.setattr(sys, "argv", [str(path), *arguments])
    runpy.run_path(str(path), run_name="__main__")
    for folder in Path().glob("sets/*/train/*"):  # of docs/images/draw_sets.py: thousands, of which a few will do
        for image in sorted(folder.iterdir())[10:]:
            image.unlink()


@pytest.mark.parametrize("names", [walk for walk in WALKS if PROVE or walk[0] in CHEAP], ids=" ".join)
def test_the_commands_of_a_page_run(workspace, monkeypatch, names):
    # a network that has learned nothing does not survive int8
    monkeypatch.setattr(sources, "digits", partial(small_digits, 4) if names == ["deploying.md"] else small_digits)
    pages = [PATHS[name] for name in names]
    # a single word, `autonl measure`, names a command and is none
    spoken = [words for page in pages for words in mentioned(page) if len(words) > 2 or words[0] != "autonl"]
    done = []
    for words in [*(words for page in pages for words in commands(page)), *(spoken if PROVE else quick(spoken))]:
        if words not in done:
            run_command(words, monkeypatch)
            done.append(words)


def quick(spoken):
    return [words for words in spoken if words[0] not in ("python", "torchrun")]


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
    for words in [*commands(page), *mentioned(page)]:
        # a word in capitals stands for one of the reader's: a number fits everywhere
        words = [re.sub(r"\b[A-Z]{2,}\d?\b", "1", word) for word in words]
        if words[0] == "autonl":
            if words[1] != "--install-completion":
                parse(words)
        elif words[:2] == ["python", "-m"]:
            assert importlib.util.find_spec(words[2]), words
        elif words[0] != "python":
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
    return module


def test_example_own_folder(workspace, capsys):
    settings = [word for setting in SMALL["search"] for word in ("--set", setting)]
    example("own_folder").main(["flowers", "--epochs", "1", "--batch-size", "16", "--res", "32", *settings])
    assert "validation images" in capsys.readouterr().out
    assert 10_000 < (workspace / "runs/own/report.html").stat().st_size < 5_000_000


def test_example_lightnl_in_timm(workspace, capsys):
    example("lightnl_in_timm").main(["mobilenetv2_035", "--steps", "2"])
    out = capsys.readouterr().out
    assert "59.3M MACs, with LightNL 63.1M" in out
    assert "outputs are the same: True" in out
    assert "17 of 17 LightNL blocks" in out


def test_example_finetune_export(workspace, capsys):
    """Weights of ten classes are tuned on three; the file answers as the network does, the script runs it."""
    torch.manual_seed(0)
    save_file(autonl.create_model("digits").state_dict(), "digits.safetensors")
    small = ["--epochs", "1", "--batch-size", "8", "--out", "flowers.onnx"]
    example("finetune_export").main(["flowers", "--network", "digits", "--weights", "digits.safetensors", *small])
    out = capsys.readouterr().out
    assert "of 6 validation images" in out
    assert "the same class on 100% of the images" in out
    assert Path("flowers.onnx.labels.txt").read_text().split() == ["daisy", "rose", "tulip"]
    assert "next: python flowers_onnx.py IMAGE" in out


def test_example_digits(workspace, monkeypatch, capsys):
    """`make search`, with an epoch a run on a few digits."""
    monkeypatch.setattr(sources, "digits", small_digits)
    module = example("digits")
    monkeypatch.setattr(module, "SEARCH_EPOCHS", 1)
    monkeypatch.setattr(module, "TRAIN_EPOCHS", 1)
    fewer = ["search.trials=0", "search.candidates=1", "search.calibrate_batches=1"]
    monkeypatch.setattr(
        module,
        "load_config",
        lambda recipe, settings, *kind: load_config(recipe, [*settings, *(fewer if kind else ())], *kind),
    )
    monkeypatch.setattr(sys, "argv", ["digits.py", "--out", "runs/demo"])
    module.main()
    out = capsys.readouterr().out
    assert all(re.search(rf"^{name} +\d", out, re.MULTILINE) for name in ("found", "digits", "random"))
    assert "points of top-1; two standard errors are" in out


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
    tested = {name.removeprefix("test_example_") for name in globals() if name.startswith("test_example_")}
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
