"""`autonl report`: what it says of whole, broken, strange and hostile run folders. The browser has its own file."""

import html.parser
import json
import math
import os
import random
import shutil
import sys
from pathlib import Path

import pytest
import yaml

from autonl import cli
from autonl.arch.codec import block_from_string, write_arch
from autonl.arch.macs import amount
from autonl.arch.spec import ArchSpec
from autonl.report import images
from autonl.report.charts import Chart, Line, front, short, tick, ticks
from autonl.report.compare import compare
from autonl.report.drawing import draw
from autonl.report.images import Judged, Mistake, judge
from autonl.report.page import gate_charts, render, section, visible
from autonl.report.runs import read_run
from autonl.train.run import evaluate_classifier
from autonl.version import __version__
from tests.conftest import prove
from tests.train.small import ON_CPU, small_config, train_small, write_digits

FIRST, SECOND, THIRD = "k3_s1_e1_c8", "k5_s2_e6_c16_se0.5_nl0.25/1", "k3_s1_e3_c24"
FILES = ("arch.yaml", "run.yaml", "config.yaml", "metrics.csv", "result.json", "classes.txt", "search.json")
HOSTILE = (
    "<script>alert(1)</script>",
    "\"'><img src=x onerror=alert(1)>",
    "\u202egpj.exe\u202c",
    "{{ 7 * 7 }}",
    "x" * 300,
)


def write_run(
    folder, *, search=False, top1=90.0, classes=("cat", "dog"), command="autonl train x", ref="x", **settings
):
    """A run folder as training and searching leave it. Of three searched blocks the search keeps two."""
    folder = Path(folder)
    folder.mkdir(parents=True)
    blocks = tuple(map(block_from_string, (FIRST, SECOND, THIRD)))
    write_arch(ArchSpec("small", blocks, (32, 32), len(classes), 8, 16), folder / "arch.yaml")
    about = {"ref": ref, "seed": 0, "command": command, "versions": {"autonl": __version__}, "hardware": "x86_64"}
    (folder / "run.yaml").write_text(yaml.safe_dump(about, allow_unicode=True))
    content = {"seed": 0, "data": {"path": "nowhere"}, "optim": {"lr": 0.1}} | settings
    content |= {"search": {"macs": "50%"}} if search else {}
    (folder / "config.yaml").write_text(yaml.safe_dump(content, allow_unicode=True))
    (folder / "classes.txt").write_text("".join(f"{name}\n" for name in classes), encoding="utf-8")
    (folder / "metrics.csv").write_text(
        f"epoch,step,lr,train_loss,val_loss,top1,train_macs\n1,5,0.1,2.5,2.25,50.0,4e6\n2,10,0.0,1.5,1.25,{top1},2e6\n"
    )
    (folder / "result.json").write_text(json.dumps({"step": 10, "top1": top1, "val_loss": 1.25, "val_images": 100.0}))
    if search:
        story = {
            "space": "tiny",
            "budget": 2_000_000,
            "warnings": ["no gate changed"],
            "gates": ["expand", "expand", "ratio"],
            "opens": [3, 6, 0.25],
            "always_open": [[True, False, False], [False] * 3, [False] * 3],
            "margins": [[[1.0, 1.0, 1.0]] * 3, [[3.0, 0.5, 0.25], [-2.5, 0.0, 0.0], [1.5, -0.5, -1.25]]],
            "candidates": [
                {
                    "macs": 1_900_000,
                    "top1": 90.0,
                    "loss": 0.5,
                    "blocks": [FIRST, SECOND, THIRD],
                    "kept": [True, False, True],
                }
            ],
        }
        (folder / "search.json").write_text(json.dumps(story))
    return folder


def page_of(*folders, judged=None):
    return render([section(read_run(Path(folder)), judged) for folder in folders])


# -- numbers into drawings --


@pytest.mark.parametrize(
    ("low", "high", "about", "expected"),
    [
        (0, 10, 5, [0, 2, 4, 6, 8, 10]),
        (0.3, 0.9, 5, [0.2, 0.4, 0.6, 0.8, 1.0]),
        (-1.2, 1.4, 5, [-2, -1, 0, 1, 2]),
        (96.2, 96.3, 4, [96.2, 96.25, 96.3]),
        (5, 5, 5, [5]),
    ],
)
def test_ticks_are_round_and_cover_the_values(low, high, about, expected):
    assert ticks(low, high, about) == pytest.approx(expected)


def test_ticks_of_epochs_are_whole_and_inside():
    assert ticks(1, 4, 6, whole=True) == [1, 2, 3, 4]
    assert ticks(1, 350, 6, whole=True) == [100, 200, 300]


def test_one_huge_loss_does_not_flatten_the_others():
    chart = Chart("loss", "", [Line("a", [(1, 1.0), (2, 1.6e7), (3, 2.0), (4, 1.5)])])
    assert chart.y_ticks == [1, 100, 1e4, 1e6, 1e8]
    assert chart.y(1.0) - chart.y(2.0) > 5  # pixels
    assert not Chart("loss", "", [Line("a", [(1, 1.0), (2, 0.0), (3, 1e7)])]).powers  # 0 has no place on such an axis


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0, "0"),
        (0.015, "0.015"),
        (20, "20"),
        (5000, "5,000"),
        (5e5, "500k"),
        (1.5e7, "15M"),
        (2e9, "2G"),
        (1e16, "1e16"),
    ],
)
def test_numbers_beside_an_axis_are_short(value, expected):
    assert tick(value) == expected


def test_points_stand_where_their_ticks_say():
    chart = Chart("loss", "", [Line("a", [(1, 0.0), (3, 4.0)])])
    assert (chart.y(0.0), chart.y(4.0), chart.y(2.0)) == (186, 10, 98)
    assert (chart.x(1), chart.x(3), chart.x(2)) == (46, 348, 197)


def test_numbers_as_people_read_them():
    assert [short(v) for v in (0, 3.0, 0.1234567, 1234.6, 1e-7, 2.5e9)] == [
        "0",
        "3",
        "0.1235",
        "1,235",
        "1e-07",
        "2.5e+09",
    ]
    assert [amount(v) for v in (None, 352_110_000, 90_300, 12)] == ["unknown", "352.11M", "90.3k", "0.0k"]
    assert amount(12.3, "milliseconds") == "12.30 ms"
    assert [amount(ms, "milliseconds") for ms in (0.045765, 0.25, 0.9996, 1)] == [
        "0.0458 ms", "0.2500 ms", "0.9996 ms", "1.00 ms",
    ]  # fmt: skip


def test_the_front_is_what_nobody_beats():
    #       cheap bad, dear good, beaten by the first, equal cost worse, beaten by all
    points = [(1, 50), (3, 80), (2, 40), (3, 70), (4, 10)]
    assert front(points) == [0, 1]
    rng = random.Random(0)
    for _ in range(prove(50, 2000)):
        points = [(rng.randint(0, 5), rng.randint(0, 5)) for _ in range(rng.randint(1, 8))]
        best = front(points)
        beaten = {
            (macs, top1)
            for macs, top1 in points
            for m, t in points
            if (m <= macs and t >= top1) and (m, t) != (macs, top1)
        }
        assert {points[place] for place in best} == set(points) - beaten


# -- a search --


def test_the_drawing_shows_every_block_and_those_left_out_in_their_places(tmp_path):
    run = read_run(write_run(tmp_path / "run", search=True))
    assert run.notes == []
    parts = draw(run)
    assert [part.name for part in parts] == [
        "stem", "block 0", "block 1", "searched block 2", "block 2", "head", "classifier"
    ]  # fmt: skip
    details = [dict(part.details) for part in parts]
    assert details[2]["margin: block with expansion 3"] == "always open"
    assert details[2]["margin: expansion 6"] == "+0.50"
    assert details[3]["margin: block with expansion 3"] == "-2.50"
    assert details[4]["margin: LightNL on 0.25 of the channels"] == "-1.25"
    assert details[2]["LightNL"] == "0.25 of the channels, stride 1"
    assert (details[2]["channels"], details[2]["map"], details[2]["SE"]) == ("8 to 16", "8 x 8", "0.5")
    assert sum(layer.macs for layer in run.layers) == run.macs
    assert [part.heights["expansion"] for part in parts] == [0, 0.167, 1, 0, 0.5, 0, 0]


def test_gates_and_budget(tmp_path):
    run = read_run(write_run(tmp_path / "run", search=True))
    charts = gate_charts(run)
    assert [chart.title for chart in charts] == ["block and expansion", "LightNL and its channels"]
    lines = {line.label: line.points for line in charts[0].lines}
    assert lines["block 2, block with expansion 3"] == [(1, 1.0), (2, -2.5)]
    macs = next(chart for chart in section(run).charts if chart.title == "MACs")
    assert (macs.level, macs.lines[0].points) == ((2.0, "budget"), [(1, 4.0), (2, 2.0)])


def test_without_knowing_what_was_kept_no_margin_is_given_to_a_block(tmp_path):
    folder = write_run(tmp_path / "run", search=True)
    story = json.loads((folder / "search.json").read_text())
    del story["candidates"][0]["kept"], story["opens"]
    (folder / "search.json").write_text(json.dumps(story))
    parts = draw(read_run(folder))
    assert len(parts) == 6
    assert not any(name.startswith("margin") for part in parts for name, _ in part.details)
    assert gate_charts(read_run(folder))[0].lines[0].label == "block 1, block and expansion, step 1"


# -- several runs --


def test_runs_are_compared_with_the_first(tmp_path):
    folders = [write_run(tmp_path / "a"), write_run(tmp_path / "b", top1=92.5, optim={"lr": 0.2}, loop={"ema": 0.9})]
    folders.append(write_run(tmp_path / "s", search=True, top1=99.0, model={}))
    runs = [read_run(folder) for folder in folders]
    assert runs[2].result["top1"] == 90  # of the best network compared, not of the super-network
    found = compare(runs)
    assert [row.top1_difference for row in found.rows] == [0, 2.5, None]
    assert [row.macs_ratio for row in found.rows] == [1, 1, 1]
    assert found.rows[0].error == pytest.approx(2 * math.sqrt(0.9 * 0.1 / 100) * 100)
    assert [(point.number, point.on_front) for point in found.points] == [(1, False), (2, True)]  # no search among them
    assert found.settings == [("optim.lr", [0.1, 0.2, 0.1]), ("loop.ema", ["-", 0.9, "-"])]
    assert "Settings that differ" in page_of(*folders)


def test_a_segmentation(tmp_path):
    """Seen by what it says of itself: classes by IoU, the picture, no confusion of whole images."""
    folder = write_run(tmp_path / "run", segment={"output_stride": 16})
    assert [note.split(":")[0] for note in read_run(folder).notes] == ["iou.csv"]
    (folder / "iou.csv").write_text("class,iou\ncat,51.5\n<i>dog,\n")
    (folder / "result.json").write_text('{"miou": 51.5, "step": 1}')
    (folder / "overlays.png").write_bytes(b"picture")
    run = read_run(folder)
    assert (run.kind, run.iou, run.notes) == ("segmentation", [("cat", 51.5), ("<i>dog", None)], [])
    page = page_of(folder, folder)
    assert "51.50 %" in page
    assert "&lt;i&gt;dog" in page
    assert "data:image/png;base64,cGljdHVyZQ==" in page


# -- folders that are not whole --


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", ["missing", "empty", "binary", "text", "list", "a folder", "a pipe"])
def test_a_line_for_what_is_not_there(tmp_path, name, damage):
    folder = write_run(tmp_path / "run", search=True)
    path = folder / name
    path.unlink()
    content = {"empty": b"", "binary": bytes(range(256)), "text": b"%@!: [", "list": b"[1, 2]"}.get(damage)
    if content is not None:
        path.write_bytes(content)
    elif damage == "a folder":
        path.mkdir()
    elif damage == "a pipe":
        os.mkfifo(path)
    run = read_run(folder)
    harmless = name == "classes.txt" and damage in ("empty", "text", "list")  # any text names classes
    if not harmless:
        assert [note for note in run.notes if note.startswith(f"{name}: ")], run.notes
    assert all("\n" not in note for note in run.notes)
    page = render([section(run)])
    assert "The network: <bdi>small</bdi>" in page or name == "arch.yaml"
    assert page.count('<figure class="chart">') > 0


@pytest.mark.parametrize("value", ["NaN", "Infinity", "1e308", "-1e308"])
@pytest.mark.parametrize(
    ("name", "old"), [("search.json", "-1.25"), ("search.json", "2000000"), ("metrics.csv", "2.5")]
)
def test_numbers_that_cannot_be_drawn(tmp_path, name, old, value):
    folder = write_run(tmp_path / "run", search=True)
    content = (folder / name).read_text()
    assert content.count(old) == 1
    (folder / name).write_text(content.replace(old, value))
    run = read_run(folder)
    assert page_of(folder).count('<figure class="chart">') > 0
    assert [note.split(":")[0] for note in run.notes] == (["search.json"] if name == "search.json" else [])
    assert "train_loss" not in run.history[0] or name != "metrics.csv"


def test_a_folder_with_one_file(tmp_path):
    folder = write_run(tmp_path / "run")
    for path in folder.iterdir():
        if path.name != "arch.yaml":
            path.unlink()
    run = read_run(folder)
    assert [note.split(":")[0] for note in run.notes] == [
        "run.yaml", "config.yaml", "metrics.csv", "classes.txt", "result.json"
    ]  # fmt: skip
    assert "The network: <bdi>small</bdi>" in render([section(run)])


def test_a_folder_of_another_version(tmp_path):
    """Unknown columns are drawn, unknown files and fields left alone; only an architecture is never guessed."""
    folder = write_run(tmp_path / "run")
    (folder / "run.yaml").write_text("versions: {autonl: 9.9}\nfuture: {a: [1]}\n")
    (folder / "metrics.csv").write_text("epoch,top1,charm\n1,50,0.25\n2,60,0.75\n3,x,\n")
    (folder / "arch.yaml").write_text((folder / "arch.yaml").read_text() + "colour: red\n")
    run = read_run(folder)
    assert [note.split(":")[0] for note in run.notes] == ["arch.yaml", "run.yaml"]
    assert "unknown field 'colour'" in run.notes[0]
    assert "was written by autonl 9.9" in run.notes[1]
    charts = {chart.title: chart for chart in section(run).charts}
    assert charts["charm"].lines[0].points == [(1, 0.25), (2, 0.75)]
    assert page_of(folder)


def test_random_damage_never_costs_the_report(tmp_path):
    whole = write_run(tmp_path / "whole", search=True)
    rng = random.Random(0)
    for number in range(prove(40, 3000)):
        folder = shutil.copytree(whole, tmp_path / f"run{number}")
        path = folder / rng.choice(FILES)
        content = bytearray(path.read_bytes())
        if rng.random() < 0.3:
            content = content[: rng.randrange(len(content))]
        for _ in range(rng.randint(1, 4) if content else 0):
            content[rng.randrange(len(content))] = rng.choice(b"\x00\xff0919-.,:[]{}\"'\n &*#ex")
        path.write_bytes(content)
        assert page_of(folder).endswith("</html>")
        shutil.rmtree(folder)


def test_a_file_that_contains_itself(tmp_path):
    folder = write_run(tmp_path / "run")
    (folder / "config.yaml").write_text("a: &a {b: *a, c: 1}\n")
    assert page_of(folder)


# -- hostile names --


class Reader(html.parser.HTMLParser):
    """The elements and the text of a page."""

    def __init__(self):
        super().__init__()
        self.tags, self.text, self.attributes = [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.text.append(data)


def test_hostile_names_are_text(tmp_path):
    folder = write_run(
        tmp_path / HOSTILE[0].replace("/", "|") / "\"'><b>",
        search=True,
        classes=HOSTILE,
        command=HOSTILE[1],
        ref=HOSTILE[0],
    )
    story = json.loads((folder / "search.json").read_text())
    story |= {"warnings": list(HOSTILE), "gates": [*HOSTILE[:3]], "space": HOSTILE[0]}
    (folder / "search.json").write_text(json.dumps(story))
    (folder / "metrics.csv").write_text(f'epoch,"{HOSTILE[0]}",{HOSTILE[4]}\n1,2,3\n2,3,4\n')
    mistakes = [Mistake(name, 0, 1, 99.0, "data:image/png;base64,", {}) for name in HOSTILE]
    confusion = [[1, 4, 0, 0, 0], *([0] * 5 for _ in range(4))]
    page = page_of(folder, folder, judged=Judged(5, 20.0, confusion, mistakes))
    reader = Reader()
    reader.feed(page)
    plain = [write_run(tmp_path / name, search=True, classes="abcde") for name in ("a", "b")]
    harmless = Reader()
    harmless.feed(page_of(*plain, judged=Judged(5, 20.0, confusion, [Mistake("a", 0, 1, 99.0, "data:,")])))
    assert {tag for tag, _ in reader.tags} == {tag for tag, _ in harmless.tags}
    scripts = [attributes for tag, attributes in reader.tags if tag == "script"]
    assert sum(attributes.get("type") != "application/json" for attributes in scripts) == 1
    assert not any(name.startswith("on") for _, attributes in reader.tags for name in attributes)
    text = " ".join(reader.text)
    assert HOSTILE[0] in text
    assert HOSTILE[1] in text
    assert HOSTILE[3] in text
    assert "49" not in [word.strip() for word in reader.text]
    assert HOSTILE[4] in text
    assert "[U+202E]gpj.exe[U+202C]" in text
    assert "\u202e" not in page


def test_nothing_hides_in_a_name():
    assert visible("a\x00b\u200f\u2067c\n") == "a[U+0000]b[U+200F][U+2067]c[U+000A]"
    assert visible("猫 é 👩‍💻 עברית") == "猫 é 👩‍💻 עברית"


# -- real trainings, from the command line --


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Three classes, one of them with a name to be careful with."""
    root = write_digits(tmp_path_factory.mktemp("report") / "images", 20, classes=3)
    (root / "class2").rename(root / "<b>two & 'half'")
    folder = root.parent / "run"
    train_small(root, folder, data={"held_out": 0.5, "workers": 0}, schedule={"epochs": 1, "warmup_epochs": 0})
    return root, folder


@pytest.fixture
def autonl(monkeypatch, capsys):
    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["autonl", *map(str, arguments)])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        captured = capsys.readouterr()
        return stop.value.code or 0, captured.out, captured.err

    return run


def test_mistakes_of_a_real_network(trained, monkeypatch):
    root, folder = trained
    found = judge(folder)
    monkeypatch.setattr(images, "MISTAKES", 1000)
    assert judge(folder).mistakes[: len(found.mistakes)] == found.mistakes  # the surest of all
    expected = evaluate_classifier(str(folder), small_config(root, data={"held_out": 0.5}), True, where=ON_CPU)
    assert (found.images, found.top1) == (expected["images"], pytest.approx(expected["top1"]))
    assert [sum(row) for row in found.confusion] == [10, 10, 10]
    wrong = found.images - sum(row[n] for n, row in enumerate(found.confusion))
    assert wrong > 12 == len(found.mistakes)
    surest = [mistake.confidence for mistake in found.mistakes]
    assert surest == sorted(surest, reverse=True)
    for mistake in found.mistakes:
        names = ["<b>two & 'half'", "class0", "class1"]
        assert Path(mistake.name).parent.name == names[mistake.true] != names[mistake.predicted]
        assert Path(mistake.name).is_file()
        assert set(mistake.maps) == {"predicted", "true"}


@pytest.mark.parametrize("in_memory", [False, True])
def test_an_unreadable_image_moves_no_name(trained, tmp_path, monkeypatch, in_memory):
    """Every mistake has the name of a file of its class, though the first of all cannot be read."""
    root, folder = shutil.copytree(trained[0], tmp_path / "images"), shutil.copytree(trained[1], tmp_path / "run")
    settings = yaml.safe_load((folder / "config.yaml").read_text())
    settings["data"] |= {"in_memory": in_memory}
    (folder / "config.yaml").write_text(yaml.safe_dump(settings))
    monkeypatch.setattr(images, "MISTAKES", 1000)
    expected = {mistake.name: mistake.picture for mistake in judge(folder, str(root)).mistakes}
    lost = sorted((root / "class0").iterdir())[0]
    lost.write_bytes(b"no image")
    found = judge(folder, str(root))
    assert found.images == 59
    assert {mistake.name: mistake.picture for mistake in found.mistakes} == {
        name: picture for name, picture in expected.items() if name != str(lost)
    }


def test_the_command(autonl, trained, tmp_path):
    root, folder = trained
    out = tmp_path / "report.html"
    code, told, errors = autonl("report", folder, "--out", out)
    assert code == 0
    assert f"next: open {out}" in told
    assert "looking at 30 images" in errors
    assert 50_000 < out.stat().st_size < 5_000_000
    assert "taken for" in out.read_text()
    again = tmp_path / "again.html"
    assert autonl("report", folder, "--out", again)[0] == 0
    assert again.read_bytes() == out.read_bytes()
    code, told, _ = autonl("report", folder, "--out", out, "--no-images", "--json")
    assert code == 0
    assert json.loads(told)["runs"][0]["notes"] == []
    assert "taken for" not in out.read_text()
    code, told, _ = autonl("report", folder, "--data", root, "--out", out, "--json")
    assert f"of 60 images of <bdi>{root}</bdi> right" in out.read_text()
    code, _, errors = autonl("report", folder, "--data", root, "--no-images", "--out", out)
    assert (code, errors) == (2, f"autonl: --data {root}: --no-images looks at none; give one of the two\n")


def test_images_that_are_gone_cost_one_line(autonl, trained, tmp_path):
    folder = shutil.copytree(trained[1], tmp_path / "run")
    settings = yaml.safe_load((folder / "config.yaml").read_text())
    settings["data"]["path"] = str(tmp_path / "gone")
    (folder / "config.yaml").write_text(yaml.safe_dump(settings))
    code, _, errors = autonl("report", folder, "--out", tmp_path / "report.html")
    assert code == 0
    assert errors == f"{folder}: confusions and mistakes: {tmp_path / 'gone'}: no such folder or .tar file of images\n"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("classes.txt", b"\xff\xfe\n", "classes.txt: cannot be read"),
        ("run.yaml", b"model: {colour: 1}\n", "the network cannot be made with {'colour': 1"),
    ],
)
def test_a_network_that_cannot_be_loaded_costs_one_line(autonl, trained, tmp_path, name, content, message):
    folder = shutil.copytree(trained[1], tmp_path / "run")
    (folder / name).write_bytes(content)
    code, _, errors = autonl("report", folder, "--out", tmp_path / "report.html")
    assert code == 0
    assert f"{folder}: confusions and mistakes: {folder}" in errors
    assert message in errors
    code, out, errors = autonl("evaluate", folder)
    assert (code, out, errors.count("\n")) == (2, "", 1)
    assert message in errors


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "nowhere: no such run folder"),
        (["EMPTY"], "not a run folder; one holds arch.yaml"),
        (["RUN", "--out", "report.txt"], "--out: 'report.txt' is not allowed; allowed: a file that ends in .html"),
        (["RUN", "--out", "no/such/report.html"], "there is no folder no/such"),
        (["RUN", "--data", "no/images"], "no/images: no such folder"),
        ([], "Missing"),
    ],
)
def test_bad_input_is_one_line(autonl, trained, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "EMPTY").mkdir()
    arguments = [str(trained[1]) if word == "RUN" else word for word in arguments]
    code, out, err = autonl("report", *arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert err.strip().count("\n") == 0
    assert not (tmp_path / "report.html").exists()


def test_trials_losses_that_are_not_finite_and_budgets_in_milliseconds(tmp_path):
    folder = write_run(tmp_path / "run", search=True)
    story = json.loads((folder / "search.json").read_text())
    story |= {"budget": 12.5, "unit": "milliseconds"}
    story["candidates"][0] |= {"loss": None, "trained": 87.654}
    (folder / "search.json").write_text(json.dumps(story))
    page = page_of(folder)
    for text in ("87.65", "not finite", "12.50 ms"):
        assert text in page
