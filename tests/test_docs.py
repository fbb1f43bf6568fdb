"""What README, docs and examples say is what happens: commands, code, pages.

Commands are run as they are written, page by page, in a folder that holds the images and files that the pages speak of,
with settings at their end that make them small. What a page says in passing is run too, with the reader's words (DIR,
NAME) replaced. `make test` runs the `autonl` commands of README and of the zoo and checks that all others exist;
`make prove` runs everything:

    autonl                in this process
    make                  every target once, in a copy of the checkout: pip as the Makefile calls it, without an index,
                          out of what is installed here; `test` and `prove`, which cannot run themselves, run their
                          check, then pytest on one file
    pip install           in the copy's environment, likewise; with --no-deps where an extra's packages are not here
    python -m benchmarks  in the copy; those that need a GPU must say so where there is none (NOT_RUN)
    torchrun              with two processes on a CPU, whatever number the page has
"""

import csv
import importlib.util
import itertools
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from functools import cache, partial
from importlib import metadata
from pathlib import Path

import pytest
import timm
import torch
import typer.main
from packaging.requirements import Requirement
from safetensors.torch import save_file

import autonl
from autonl import cli
from autonl.data import digits as embedded
from autonl.data import sources
from autonl.data.memory import StoredImages
from autonl.search.config import SearchConfig
from autonl.train.config import load_config
from benchmarks import environment_keys
from benchmarks.lightnl import TABLE as BLOCK_TABLE
from benchmarks.networks import TABLE as NETWORK_TABLE
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
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]

BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PROGRAM = r"(?:autonl|make|python|pip|torchrun) "
# a program and a word behind it, whatever program it is; or a file to source, or a variable to set
COMMAND = re.compile(r"(?:[a-z][\w-]*|\.|[A-Z_]+=\S*)\s")
# what the reader puts in
MEANT = {
    "DIR": "flowers", "VOC_ROOT": "voc", "NAME": "autonl_l", "REF": "runs/trained", "IMAGE": "photo.jpg",
    "SUITE": "gain",
}  # fmt: skip

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
FEWER = {"measure": ["--rounds", "1", "--space", "digits", "--width", "0.25"]}  # of the space that SMALL searches

FEW = " ".join(
    f"--set {setting}"
    for setting in (
        *("data.image_size=32", "data.stored_size=32", "data.batch_size=4", "data.workers=0", "optim.lr=0.01"),
        *("schedule.epochs=1", "schedule.warmup_epochs=0", "loop.calibrate_batches=0"),
    )
)
# what makes a benchmark small, and what it says at its end
BENCHMARKS = {
    "benchmarks.budgets": ("--shares 60 --seeds 0 --set schedule.epochs=1 --out results", r"^60 0 \d+ \d+ "),
    "benchmarks.cpu": ("--repeats 1 --out results", r"layout channels_last .* share 0\.\d+"),
    "benchmarks.evidence": (
        f"--only gain/MobileNetV2/0 --only EfficientNet-Lite0 --out results --runs results/runs {FEW}",
        r" 0 of 1 jobs are left$",
    ),
    "benchmarks.evidence.document": ("", r"\A\Z"),
    "benchmarks.fidelity": (f"--epochs 1 --out results.csv {FEW}", r"'selection_top1': \d"),
    "benchmarks.lightnl": (
        "--no-compile --seconds 1 --out results",
        r"speed_lightnl\.csv$|rows are beyond their bound",
    ),
    "benchmarks.networks": ("--batch 8 --no-compile --out results", r"^timm:mobilenetv2_100 .*inference"),
    "benchmarks.search": ("--space digits --res 32 --batch 4 --steps 1 --rounds 1", r"^ratio +\d"),
    "benchmarks.training": ("--epochs 2 --workers 1 --set data.batch_size=16", r"training_\w+\.csv$"),
}
GPU = "this benchmark needs a CUDA GPU, and none is visible here"
NOT_RUN = (
    {}
    if torch.cuda.is_available()
    else {
        "python -m benchmarks.lightnl": GPU,
        "python -m benchmarks.lightnl --settle": GPU,
        "python -m benchmarks.networks autonl_l autonl_s": GPU,
        "python -m benchmarks.training --data DIR --epochs 4": GPU,
    }
)


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


def make_what_is_spoken_of(words, request):
    """Runs and files of the reader's that a command takes and that no command of its page makes."""
    taken = [word for name, word in itertools.pairwise(words) if name not in ("--out", "--label")]
    if "model.safetensors" in taken:
        save_file(timm.create_model("mobilenetv2_100").state_dict(), "model.safetensors")
    for run in ("runs/trained", "runs/other"):
        if run in taken and not Path(run).exists():
            # large enough for pixel 150,80, with LightNL in all blocks, and more than 20 images held out
            settings = "--set data.image_size=160 --set data.held_out=0.5"
            network = f"autonl train mobilenetv2_lightnl_035 --data flowers {settings} --out {run}"
            run_autonl(shlex.split(network), request)


def smaller(command):
    return [word for setting in SMALL.get(command, []) for word in ("--set", setting)] + FEWER.get(command, [])


def run_autonl(words, request):
    make_what_is_spoken_of(words, request)
    request.getfixturevalue("monkeypatch").setattr(sys, "argv", [*words, *smaller(words[1])])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert not stop.value.code, words


def run_completion(words, request):
    """Asked of a shell: the last line keeps bash from becoming the command."""
    checkout = request.getfixturevalue("checkout")
    script = f". .venv/bin/activate\n{shlex.join(words)}\nexit $?"
    run_in(checkout, "bash", "-c", script, HOME=str(Path.cwd()))
    assert "autonl" in Path(".bash_completions/autonl.sh").read_text()


def run_activate(words, request):
    script = f"{shlex.join(words)} && autonl --version"
    assert run_in(request.getfixturevalue("checkout"), "sh", "-c", script).stdout == f"autonl {autonl.__version__}\n"


def check_make(words, request):
    """Every target is run by test_make."""
    assert words[1] in (*MADE, "clean"), words


def extras_of(words):
    return re.findall(r"[\w-]+", " ".join(words[2:]).partition("[")[2])


def is_installed(requirement):
    try:
        return requirement.specifier.contains(metadata.version(requirement.name))
    except metadata.PackageNotFoundError:
        return False


def run_pip(words, request):
    checkout = request.getfixturevalue("checkout")
    needed = [Requirement(text) for extra in extras_of(words) for text in EXTRAS[extra]]
    without = [] if all(map(is_installed, needed)) else ["--no-deps"]
    run_in(checkout, checkout / ".venv/bin/pip", *words[1:], *without)
    if words[2].startswith("."):
        place = run_in(Path.cwd(), checkout / ".venv/bin/python", "-c", "import autonl; print(autonl.__file__)").stdout
        assert Path(place).is_relative_to(checkout / ".venv"), place
    version = run_in(Path.cwd(), checkout / ".venv/bin/autonl", "--version").stdout
    assert version == f"autonl {autonl.__version__}\n"


def run_benchmark(words, request):
    """Returns why it was not run: without a GPU, some do nothing but say so."""
    small, says = BENCHMARKS[words[2]]
    if "voc" in words:  # beside the images, the weights that the suite starts from
        torch.save(timm.create_model("tf_efficientnet_lite0").state_dict(), "voc/tf_efficientnet_lite0_fp16.pth")
    own = [*words[1:], *small.split()]
    own = [str(Path(word).absolute()) if Path(word).exists() or word.startswith("results") else word for word in own]
    done = run_in(request.getfixturevalue("copy"), sys.executable, *own, status=2)
    if done.returncode == 2:
        assert (done.stdout, done.stderr) == ("", f"{GPU}\n"), words
        return GPU
    assert re.search(says, done.stdout, re.MULTILINE), (words, done.stdout)
    return None


def run_script(words, request):
    path = Path(words[1]) if Path(words[1]).is_file() else ROOT / words[1]
    request.getfixturevalue("monkeypatch").setattr(sys, "argv", [str(path), *words[2:]])
    runpy.run_path(str(path), run_name="__main__")
    for folder in Path().glob("sets/*/train/*"):  # of docs/images/draw_sets.py: thousands, of which a few will do
        for image in sorted(folder.iterdir())[10:]:
            image.unlink()


def run_torchrun(words, request):
    two = [re.sub(r"^--nproc-per-node=\d+$", "--nproc-per-node=2", word) for word in words[1:]]
    command = words[words.index("autonl") + 1]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", *two, *smaller(command)]
    done = run_in(Path.cwd(), *torchrun, PYTHONPATH=str(ROOT), CUDA_VISIBLE_DEVICES="")
    assert done.stdout.count("next: ") == 1  # two that did not know of each other would both say it


RULES = {
    r"autonl (?!--install)": run_autonl,
    r"autonl --install-completion$": run_completion,
    r"make [a-z]+$": check_make,
    r"pip install ": run_pip,
    r"python -m benchmarks\.": run_benchmark,
    r"python \S+\.py": run_script,
    r"torchrun ": run_torchrun,
    r"\. \S+/activate$": run_activate,
}


def rule_of(words):
    found = [rule for start, rule in RULES.items() if re.match(start, shlex.join(words))]
    assert len(found) == 1, f"no rule runs {shlex.join(words)}"
    return found[0]


def run_command(words, request):
    return rule_of(words)([MEANT.get(word, word) for word in words], request)


@pytest.mark.parametrize("names", [walk for walk in WALKS if PROVE or walk[0] in CHEAP], ids=" ".join)
def test_the_commands_of_a_page_run(workspace, monkeypatch, request, names):
    # a network that has learned nothing does not survive int8
    monkeypatch.setattr(sources, "digits", partial(small_digits, 4) if names == ["deploying.md"] else small_digits)
    pages = [PATHS[name] for name in names]
    lines = {
        shlex.join(words): words
        for words in [words for read in (commands, mentioned) for page in pages for words in read(page)]
        if PROVE or words[0] == "autonl"
    }
    left_out = {line: why for line, words in lines.items() if (why := run_command(words, request))}
    assert left_out == {line: NOT_RUN[line] for line in lines if line in NOT_RUN}


def test_what_no_page_runs_here():
    """Reports what NOT_RUN holds, which must be on some page."""
    written = {shlex.join(words) for page in PAGES for words in [*commands(page), *mentioned(page)]}
    assert NOT_RUN.keys() <= written
    if NOT_RUN:
        pytest.skip("; ".join(f"{line}: {why}" for line, why in NOT_RUN.items()))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_has_a_rule(page):
    text = page.read_text()
    assert {name for name, _ in BLOCK.findall(text)} <= {"", "sh", "bash", "text", "python", "yaml"}
    assert len(re.findall("```", text)) == 2 * len(BLOCK.findall(text)), "a block that no test reads"
    for words in [*commands(page), *mentioned(page)]:
        rule_of(words)


def parse(words):
    """Refuses a command, an option or a number of arguments that the command line does not have."""
    group = typer.main.get_command(cli.app)
    if words[1].startswith("-"):
        group.make_context("autonl", words[1:])
        return
    assert words[1] in group.commands, words
    group.commands[words[1]].make_context(words[1], words[2:])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_setting_exists(page):
    """Those in sentences too, which belong to no command."""
    for setting in re.findall(r"--set ([a-z_]+\.[a-z_]+=[^\s`']+)", page.read_text()):
        load_config(None, [setting], SearchConfig)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_exists(page, request):
    for words in [*commands(page), *mentioned(page)]:
        rule = rule_of(words)
        # a word in capitals stands for one of the reader's: a number fits everywhere
        words = [re.sub(r"\b[A-Z]{2,}\d?\b", "1", word) for word in words]
        if rule is run_autonl:
            parse(words)
        elif rule is run_benchmark:
            assert words[2] in BENCHMARKS, words
        elif rule is run_pip:
            assert set(extras_of(words)) <= EXTRAS.keys(), words
        elif rule is check_make:
            check_make(words, request)


# -- what the commands stand on: benchmarks, the Makefile, extras --


def test_every_benchmark_is_on_a_page():
    files = [path for path in (ROOT / "benchmarks").rglob("*.py") if 'if __name__ == "__main__":' in path.read_text()]
    modules = {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__main__") for path in files}
    lines = [words for page in PAGES for words in [*commands(page), *mentioned(page)]]
    assert modules == BENCHMARKS.keys() == {words[2] for words in lines if rule_of(words) is run_benchmark}


@pytest.mark.skipif(not PROVE, reason="needs a copied checkout: make prove")
@pytest.mark.parametrize(("name", "columns"), [("lightnl", BLOCK_TABLE), ("networks", NETWORK_TABLE)])
def test_a_benchmark_writes_its_table(copy, name, columns):
    """With --doc, without a GPU, from the rows of an earlier call."""
    row = {column: f"<{column}>" for column in (*columns, *environment_keys())}
    with (copy / "benchmarks" / "results" / f"speed_{name}.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(row))
        writer.writeheader()
        writer.writerow(row)
    run_in(copy, sys.executable, "-m", f"benchmarks.{name}", "--doc")
    assert f"| {' | '.join(row[column] for column in columns)} |" in (copy / "docs" / "speed.md").read_text()


# what a target says or, a path, makes
MADE = {
    "search": "points of top-1; two standard errors are",
    "test": "passed in",
    "prove": "passed in",
    "check": "Success: no issues found",
    "docs": "build/docs/index.html",
    "browser": "/chromium\n",
    "format": "left unchanged",
}


def test_every_make_target_is_known():
    targets = re.search(r"^\.PHONY: (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[1].split()
    assert targets == [*MADE, "clean"]  # which has a test of its own


@pytest.mark.skipif(not PROVE, reason="searches for four minutes: make prove")
@pytest.mark.parametrize("target", MADE)
def test_make(target, request):
    if target == "docs":
        pytest.importorskip("mkdocs", reason="needs mkdocs-material: run `make docs`")
    if target == "browser" and not (shutil.which("chromium") and importlib.util.find_spec("playwright")):
        pytest.skip("would install a browser: run `make browser`")
    folder = request.getfixturevalue("checkout")
    done = run_in(folder, "make", target, PYTEST_ADDOPTS="tests/test_layers.py")
    assert MADE[target] in done.stdout or (folder / MADE[target]).exists(), done.stdout


def test_make_clean(tmp_path):
    folder = copy_checkout(tmp_path / "autonl")
    files = sorted(folder.rglob("*"))
    for name in (".venv", ".mypy_cache", "build", "autonl.egg-info"):
        (folder / name / "inside").mkdir(parents=True)
    run_in(folder, "make", "clean")
    assert sorted(folder.rglob("*")) == files


def test_the_extras_are_what_is_installed():
    """Requirements that parse, and versions here that meet them."""
    needed = [Requirement(text) for texts in EXTRAS.values() for text in texts]
    here = {distribution.name.lower().replace("_", "-") for distribution in metadata.distributions()}
    found = [requirement for requirement in needed if requirement.name.lower() in here]
    assert {"mlxtend", "onnx", "pytest"} <= {requirement.name for requirement in found}
    assert [str(requirement) for requirement in found if not is_installed(requirement)] == []


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
    source = copy_checkout(tmp_path / "source")
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
