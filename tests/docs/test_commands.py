"""The commands of README and docs do what the pages say.

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

import importlib.util
import itertools
import re
import runpy
import shlex
import shutil
import sys
import tomllib
from functools import partial
from importlib import metadata
from pathlib import Path

import pytest
import timm
import torch
from packaging.requirements import Requirement
from safetensors.torch import save_file

import autonl
from autonl import cli
from autonl.data import sources
from autonl.nn.kernels.layers import FusedDepthwise, FusedNormAct
from autonl.nn.light_nonlocal import LightNL
from autonl.search.config import SearchConfig
from autonl.train.config import load_config
from benchmarks import RESULTS, environment_keys, lightnl, networks, read_rows
from tests.conftest import PROVE
from tests.docs.pages import BLOCK, PAGES, ROOT, SMALL, commands, copy_checkout, mentioned, parse, run_in, small_digits

PATHS = {page.name: page for page in PAGES}
CHEAP = ["README.md", "zoo.md"]
# pages whose commands go on with what those of another page made
WALKS = [["images.md", "report.md"], *([page.name] for page in PAGES if page.name not in ("images.md", "report.md"))]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]

# what the reader puts in
MEANT = {
    "DIR": "flowers", "VOC_ROOT": "voc", "NAME": "autonl_l", "REF": "runs/trained", "IMAGE": "photo.jpg",
    "SUITE": "gain", "RUN": "runs/searched",
}  # fmt: skip

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
    "benchmarks.agreement": (
        "--steps 1 --set data.batch_size=16 --set schedule.warmup_epochs=0 --out results",
        r"^autonl_l 1 layers \d",
    ),
    "benchmarks.branches": ("--count 16 --out results", r"searched: \d+ LightNL blocks$"),
    "benchmarks.budgets": ("--shares 60 --seeds 0 --set schedule.epochs=1 --out results", r"^60 0 \d+ \d+ "),
    "benchmarks.cpu": ("--repeats 1 --out results", r"layout channels_last .* share 0\.\d+"),
    "benchmarks.evidence": (
        f"--only gain/MobileNetV2/0 --only EfficientNet-Lite0 --out results --runs results/runs {FEW}",
        r" 0 of 1 jobs are left$",
    ),
    "benchmarks.evidence.document": ("", r"\A\Z"),
    "benchmarks.fidelity": (f"--epochs 1 --out results.csv {FEW}", r"'selection_top1': \d"),
    "benchmarks.latency": ("--width 0.25 --networks 3 --rounds 1 --out results", r"^median +median error \d"),
    "benchmarks.layers": ("--batch 8 --seconds 1 --out results", r"^autonl_s norm .*'ours': '\d"),
    "benchmarks.lightnl": (
        "--no-compile --seconds 1 --out results",
        r"speed_lightnl\.csv$|rows are beyond their bound",
    ),
    "benchmarks.networks": ("--batch 8 --compile --out results", r"^timm:mobilenetv2_100 .*inference"),
    "benchmarks.price": (
        "onnxruntime --calls 1 --rounds 1 --res 64 --out results",
        r"^onnxruntime --custom-op: \d\.\d+",
    ),
    "benchmarks.search": ("--space digits --res 32 --batch 4 --steps 1 --rounds 1", r"^ratio +\d"),
    "benchmarks.tried": ("--out results", r"searched: 2 trials$"),
    "benchmarks.trials": ("--seeds 1 --out results", r"'worths': 'shared', 'trials': 20"),
    "benchmarks.training": ("--epochs 2 --workers 1 --set data.batch_size=16", r"training_\w+\.csv$"),
}
GPU = "this benchmark needs a CUDA GPU, and none is visible here"
NOT_RUN = (
    {}
    if torch.cuda.is_available()
    else {
        "python -m benchmarks.layers": GPU,
        "python -m benchmarks.lightnl": GPU,
        "python -m benchmarks.lightnl --settle": GPU,
        "python -m benchmarks.networks autonl_l autonl_s": GPU,
        "python -m benchmarks.training --data DIR --epochs 4": GPU,
    }
)


def make_what_is_spoken_of(words, request):
    """Runs and files of the reader's that a command takes and that no command of its page makes."""
    taken = [word for name, word in itertools.pairwise(words) if name not in ("--out", "--label")]
    if "model.safetensors" in taken:
        save_file(timm.create_model("mobilenetv2_100").state_dict(), "model.safetensors")
    for run in ("runs/trained", "runs/other"):
        if run in taken and not Path(run).exists():
            # large enough for pixel 150,80, with LightNL in all blocks, and more than 20 images held out; by energy,
            # as the published form takes the rounding of a network that has hardly learned anything to the cube
            settings = "--nl lightnl_energy --set data.image_size=160 --set data.held_out=0.5"
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
    if "runs/searched" in words and not Path("runs/searched").exists():
        search = "autonl search --data digits --space digits --recipe demo --set search.trials=2 --out runs/searched"
        run_autonl(shlex.split(search), request)
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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_setting_exists(page):
    """Those in sentences too, which belong to no command."""
    for setting in re.findall(r"--set ([a-z_]+\.[a-z_]+=[^\s`']+)", page.read_text()):
        assert load_config(None, [setting], SearchConfig) != SearchConfig(), setting


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


@pytest.mark.parametrize("benchmark", [lightnl, networks])
def test_the_tables_of_speed_are_made_from_their_rows(benchmark):
    """`python -m benchmarks.lightnl --doc` and `python -m benchmarks.networks --doc` change nothing."""
    name = f"speed_{benchmark.__name__.split('.')[-1]}"
    made = benchmark.document(read_rows(RESULTS / f"{name}.csv"))
    assert f"<!-- {name} -->\n{made}\n<!-- /{name} -->\n" in (ROOT / "docs" / "speed.md").read_text()


def test_a_block_that_misses_its_limit_is_named():
    """By hand: 80 us where 50 are allowed, 2 times plain in a graph, exactly 4 and 3 times as a user runs it."""
    us = {
        "floor": 10,
        "limit": 50,
        "inference_plain": 400,
        "inference_fused": 100,
        "step_plain": 900,
        "step_fused": 300,
    }
    us |= {"inference_plain_graph": 160, "inference_fused_graph": 80, "step_plain_graph": 300, "step_fused_graph": 200}
    us |= {"chain_plain": 1, "chain_fused": 1, "chain_plain_graph": 1, "chain_fused_graph": 1}
    us |= {"step_compiled": 301, "step_compiled_graph": 199}
    row = {f"{key}_us": str(value) for key, value in us.items()}
    row |= {"map": "7", "channels": "8", "ratio": "0.5", "stride": "1"} | dict.fromkeys(environment_keys(), "?")
    *_, limit, inference, graph, step, compiled, compiled_graph = lightnl.document([row]).splitlines()
    missed = "**missed** at 7 x 8 (0.5, 1)."
    assert limit.endswith(missed)
    assert compiled_graph.endswith(missed)
    assert not any(line.endswith(missed) for line in (inference, graph, step, compiled))


def test_what_is_wanted_of_networks_is_what_training_shows():
    """By hand: 90 of 100 images/s, 3 of 2 GiB; inference does not count, and what was not timed is left out."""
    rows = [
        {"network": "net", "variant": variant, "mode": mode, "images_per_s": speed, "peak_gib": memory}
        for mode, variant, speed, memory in (
            *(("train", "kernels", "90", "3"), ("train", "bare", "100", "2")),
            *(("inference", "kernels", "70", "8"), ("inference", "bare", "70", "1")),
        )
    ]
    same = dict.fromkeys(environment_keys(), "?") | {"compiled": "True", "batch": "1"}
    lines = networks.document([row | same for row in rows]).splitlines()
    assert "| speed: kernels, compiled / bare, compiled | 0.92 | 0.900 |" in lines
    assert "| memory: kernels, compiled / bare, compiled | at most 1.15 | 1.500 |" in lines
    assert "| speed: kernels, eager / plain, eager | 1.5 | - |" in lines
    assert not any("layers" in line for line in lines)


@pytest.mark.parametrize(
    ("variant", "blocks", "fused", "layers"),
    [
        ("plain", True, False, False),
        ("kernels", True, True, False),
        ("layers", True, True, True),
        ("bare", False, False, False),
        ("bare layers", False, False, True),
    ],
)
def test_a_variant_has_the_kernels_that_it_says(variant, blocks, fused, layers):
    modules = list(networks.build("digits", variant).modules())
    found = [module.fused for module in modules if isinstance(module, LightNL)]
    changed = any(isinstance(module, FusedDepthwise | FusedNormAct) for module in modules)
    assert (bool(found), any(found), changed) == (blocks, fused, layers)
    assert variant in networks.VARIANTS


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
