"""Dependencies point one way: cli -> {search, segment, cam ...} -> train -> {data, models} -> nn -> arch."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import autonl

PACKAGE = Path(autonl.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))

# part of the package -> the parts it may import besides itself
ALLOWED = {
    "errors": set(),
    "version": set(),
    "arch": {"errors"},
    "nn": {"arch", "errors"},
    "models": {"nn", "arch", "errors"},
    "published": {"nn"},
    "weights": {"published", "models", "nn", "arch", "errors"},
    "profile": {"models", "nn", "arch", "errors"},
    "data": {"arch", "errors"},
    "train": {"data", "models", "weights", "nn", "arch", "errors", "version"},
    "search": {"train", "data", "models", "weights", "nn", "arch", "errors", "version"},
    "export": {"segment", "train", "data", "models", "weights", "nn", "arch", "errors", "version"},
    "latency": {"export", "models", "errors"},
    "latency_table": {"latency", "export", "search", "models", "arch", "errors"},
    "segment": {"train", "data", "models", "weights", "arch", "errors"},
    "cam": {"train", "data", "weights", "nn", "errors", "version"},
    "report": {"cam", "train", "data", "models", "weights", "profile", "arch", "errors", "version"},
}
TOP = {"__init__", "__main__", "cli"}  # may import everything below them

# package -> the parts of autonl that alone may import it
CONFINED = {
    "typer": {"cli"},
    "rich": {"cli"},
    "lightning": {"train"},
    "mlxtend": {"data"},
    "jinja2": {"report"},
    "matplotlib": {"search", "segment", "cam"},
}
ARCH_MAY_IMPORT = {"autonl", "yaml", *sys.stdlib_module_names}


def imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            yield node.module


def part(path):
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_one_way(path):
    here = part(path)
    for name in imports(path):
        root, _, rest = name.partition(".")
        if root == "autonl" and here not in TOP:
            assert rest.split(".")[0] in ALLOWED[here] | {here}, f"{here} imports {name}"
        if root in CONFINED:
            assert here in CONFINED[root], f"{here} imports {name}"


def test_arch_imports_no_torch():
    for path in (PACKAGE / "arch").rglob("*.py"):
        assert {name.split(".")[0] for name in imports(path)} <= ARCH_MAY_IMPORT


def test_no_drawer_for_odds_and_ends():
    assert not {path.stem for path in FILES} & {"utils", "util", "common", "helpers", "misc"}


def test_models_and_profile_import_nothing_heavier_than_torch_and_timm():
    code = (
        "import sys\n"
        "from autonl.cli import main\n"
        "sys.argv = ['autonl', 'profile', 'autonl_s', '--json']\n"
        "try: main()\n"
        "except SystemExit as stop: assert not stop.code, stop.code\n"
        "heavy = {'lightning', 'torchmetrics', 'tensorboard', 'matplotlib', 'mlxtend', 'pandas', 'onnx', 'sklearn'}\n"
        "print(sorted(heavy & set(sys.modules)), file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "[]"
