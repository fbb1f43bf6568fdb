"""The evidence harness: what it counts, what it says, and that it runs."""

import dataclasses
import json
import signal
import subprocess
import sys
from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from autonl.arch.codec import block_to_string, spec_to_dict
from autonl.arch.macs import count_macs
from autonl.models import resolve
from autonl.nn.light_nonlocal import LightNL
from benchmarks import RESULTS, add_rows, put_rows, read_rows
from benchmarks.branches import Watch
from benchmarks.evidence import curves, document
from benchmarks.evidence.__main__ import append, keys, queue, row_file
from benchmarks.evidence.document import DOC, gains, rivals, what_random_networks_like
from benchmarks.evidence.groups import Claim, Group, groups, no_worse, overlap, read, runs_to_show, verdict
from benchmarks.evidence.jobs import SUITES, Job
from benchmarks.evidence.run import COLUMNS, Setup, budget_of, course, network_of
from benchmarks.tried import rows_of


@pytest.mark.parametrize("suite", SUITES)
def test_no_two_jobs_of_a_suite_are_the_same_row(suite):
    jobs = SUITES[suite]()
    assert max(Counter(job.key for job in jobs).values()) == 1
    keys_so_far = {job.key for name in SUITES for job in SUITES[name]()}
    assert {job.needs for job in jobs if job.needs} <= keys_so_far


def test_random_networks_cost_what_the_budget_says(tmp_path):
    job = Job("search", "random", 3, "random")
    spec = network_of(job, Setup("", "", tmp_path, tmp_path / "a.json"))
    rows = [row for row in read_rows(RESULTS / "evidence_search.csv") if (row["job"], row["seed"]) == ("random", "3")]
    assert [row["blocks"] for row in rows] == [" ".join(map(block_to_string, spec.blocks))]  # as it was then
    assert 0.99 * budget_of(job) <= count_macs(spec) <= budget_of(job)
    assert spec.resolution == (96, 96)
    assert network_of(job, Setup("", "", tmp_path, tmp_path / "a.json")) == spec


def made_groups(**values):
    return {name: Group(name, list(map(float, found)), []) for name, found in values.items()}


@pytest.mark.parametrize(
    ("better", "worse", "target", "said"),
    [
        # means 12 and 10, standard errors sqrt(0.75 / 3) = 0.5 each: noise 2 * sqrt(0.5) = 1.41
        ([11.0, 12.5, 12.5], [9.0, 10.5, 10.5], 0.0, "**holds**: +2.00, two standard errors 1.41 (n = 3 and 3)"),
        ([11.0, 12.5, 12.5], [9.0, 10.5, 10.5], 2.5, "**not shown**: +2.00"),
        ([11.0, 12.5, 12.5], [9.0, 10.5, 10.5], 3.5, "**smaller than that here**: +2.00"),
        ([10.0, 11.5, 11.5], [9.0, 10.5, 10.5], 0.0, "**not shown**: +1.00"),
        ([8.5, 10.0, 10.0], [9.0, 10.5, 10.5], 0.0, "**not shown**: -0.50"),
        ([7.5, 9.0, 9.0], [9.0, 10.5, 10.5], 0.0, "**does not hold here**: -1.50"),
        ([11.9, 12.1], [9.0, 10.5, 10.5], 0.0, "+2.00 (n = 2 and 3): too few runs to say"),
        ([], [9.5, 10.5], 0.0, "not run yet"),
    ],
)
def test_what_is_said_of_a_claim(better, worse, target, said):
    found = made_groups(worse=worse) | (made_groups(better=better) if better else {})
    assert verdict(Claim("s", "it is so", "better", "worse", target), found).startswith(said)


def test_trials_are_read_in_the_order_in_which_they_ran(tmp_path):
    """Nine trials, two of them with one result: the first eight are drawn by the gates and by whims, four each."""
    results = [0.0, 32.0, 31.0, 36.0, 36.0, 35.0, 34.0, 33.0, 39.0]
    blocks = [[f"k3_s1_e{n}_c8"] * n + ["k3_s1_e1_c8_se0.25_nl0.25/1"] for n in range(len(results))]
    candidates = [
        {"trained": top1, "top1": 50.0 + n, "kept": [True] * (n + 1) + [False], "blocks": blocks[n]}
        for n, top1 in enumerate(results)
    ]
    candidates.sort(key=lambda one: -one["trained"])
    not_tried = {"trained": None, "top1": 60.0, "kept": [True], "blocks": []}
    (tmp_path / "search.json").write_text(json.dumps({"candidates": [*candidates, not_tried]}))
    (tmp_path / "trials.json").write_text(json.dumps({str(n): [top1, 100] for n, top1 in enumerate(results)}))
    rows = rows_of(tmp_path)
    assert [row["trained"] for row in rows] == results
    assert [row["supernet"] - 50 for row in rows] == list(range(9))
    assert [row["drawn_by"] for row in rows] == ["gates"] * 4 + ["whims"] * 4 + ["results"]
    assert [(row["blocks"], row["lightnl"], row["se"]) for row in rows] == [(n + 1, 1, 1) for n in range(9)]
    (tmp_path / "trials.json").write_text(json.dumps({str(n): [top1, 100] for n, top1 in enumerate(results[:8])}))
    assert {row["drawn_by"] for row in rows_of(tmp_path)} == {"gates"}  # so few follow nothing


@pytest.mark.parametrize(
    ("one", "other", "said"),
    [
        # 0, 1.5 and 1.5 are 1 with a standard error of 0.5: noise of two such 2 * sqrt(0.5) = 1.41
        (
            [1, 2.5, 2.5],
            [2, 3.5, 3.5],
            "one 1.00 to 2.50, other 2.00 to 3.50: they overlap; -1.00, two standard errors 1.41",
        ),
        (
            [4, 5.5, 5.5],
            [2, 3.5, 3.5],
            "one 4.00 to 5.50, other 2.00 to 3.50: they **do not overlap**; +2.00, two standard errors 1.41",
        ),
        ([4, 5], [2, 3.5, 3.5], "one 4.00 to 5.00, other 2.00 to 3.50: too few runs to say"),
    ],
)
def test_what_is_said_of_two_ranges(one, other, said):
    assert overlap(*made_groups(one=one, other=other).values()) == said


def group_of(name, *values, macs="0"):
    return Group(name, list(values), [{"macs": macs}] * len(values))


def test_what_is_said_of_the_operators():
    """By hand: LightNL adds 2 MACs, the other 7: 3.5 times; the means are 58 and 60, with standard errors of 0.5."""
    found = {
        "wang": group_of("wang", 59, 60.5, 60.5, macs="17"),
        "none": group_of("none", 50, macs="10"),
        "lightnl": group_of("lightnl", 57, 58.5, 58.5, macs="12"),
    }
    assert rivals(found).endswith(" they add): **does not hold here**: wang -2.00 ± 0.71 (3.5 times).")
    found["lightnl"] = group_of("lightnl", 58, 58, macs="12")
    assert rivals(found).endswith(" they add): too few runs to say: wang -2.00 (3.5 times).")
    assert no_worse(group_of("a", 57, 58.5, 58.5), group_of("b", 58, 59.5, 59.5)) == "no difference shown"
    assert no_worse(group_of("a", 59, 60.5, 60.5), group_of("b", 57, 58.5, 58.5)) == "**holds**"
    assert no_worse(group_of("a", 60, 61, 62), group_of("b", 58, 58)) == "too few runs to say"


def test_how_far_ahead_a_segmentation_is_on_the_way(monkeypatch):
    """Twelve epochs, read out at every second: n points of mIoU ahead at epoch n, 0.5 below in the loss."""

    def curve(job, seed, miou, loss):
        row = {"suite": "segmentation", "job": job, "seed": seed, "train_loss": str(loss)}
        return [row | {"miou": str(miou * epoch) if epoch % 2 == 0 else ""} for epoch in range(1, 13)]

    rows = [*curve("plain, long", "7", 1, 1.0), *curve("+ it", "7", 5, 9.0), *curve("+ it, long", "7", 2, 0.5)]
    monkeypatch.setattr(curves, "read", lambda suite: rows)
    _, _, miou, loss = curves.ahead_on_the_way("plain", "+ it")
    assert miou == "| mIoU, long, seed 7 | +2.0 | +4.0 | +6.0 | +8.0 | +10.0 | +12.0 |"
    assert loss == f"| training loss, long, seed 7 |{' -0.50 |' * 6}"


def test_how_far_apart_searched_networks_are_on_the_way(monkeypatch):
    """Seven epochs, two runs a side: 2 n + 1 less n points in the means of epoch n; what has no curve has no line."""

    def curve(job, seed, top1):
        row = {"suite": "search", "job": job, "seed": seed, "train_loss": "2"}
        return [row | {"top1": str(top1 + epoch * (1 + (job == "a, long")))} for epoch in range(1, 8)]

    rows = [*curve("a, long", "0", 0), *curve("a, long", "1", 2), *curve("b, long", "0", 0), *curve("b, long", "1", 0)]
    monkeypatch.setattr(curves, "read", lambda suite: [*rows, *curve("a, large", "0", 0)])
    _, _, top1, loss = curves.means_on_the_way("a", "b", (", long", ", large"))
    assert top1 == "| top-1, long | +2.0 | +3.0 | +4.0 | +5.0 | +6.0 | +8.0 |"  # epochs 1, 2, 3, 4, 5 and 7
    assert loss == f"| training loss, long |{' +0.00 |' * 6}"


def test_how_many_runs_would_show_a_point():
    """Of a variance of 1 each, two standard errors of a difference are 2 sqrt(2 / n): one point at n = 8."""
    ones = group_of("a", 1, 2, 3)
    assert runs_to_show(1.0, ones, ones) == 8
    assert runs_to_show(2.0, ones, ones) == 2


@pytest.mark.parametrize(
    ("loss", "explodes"), [("nan", True), ("1e27", True), ("11.7", True), ("4.6", False), ("", False)]
)
def test_a_validation_loss_that_says_that_images_explode(loss, explodes):
    assert document.explodes({"val_loss": loss}) is explodes


def test_lightnl_of_all_channels(tmp_path):
    (job,) = (job for job in SUITES["gain"]() if job.name == "+ LightNL of all channels")
    spec, published = (
        network_of(one, Setup("", "", tmp_path, tmp_path / "a.json"))
        for one in (job, dataclasses.replace(job, ratio=0.0))
    )
    assert {block.lightnl.ratio for block in spec.blocks} == {1.0}
    assert [block.lightnl.stride for block in spec.blocks] == [block.lightnl.stride for block in published.blocks]


def test_rows_of_a_csv(tmp_path):
    """Where there is no folder yet, one is made: nobody measures for minutes and loses it."""
    path = tmp_path / "made" / "rows.csv"
    add_rows(path, ("a", "b"), [{"a": 1, "b": 2, "left out": 3}])
    add_rows(path, ("a", "b"), [{"a": 4}])
    assert path.read_bytes() == b"a,b\n1,2\n4,\n"
    put_rows(path, ("a",), [{"a": 5}])
    assert read_rows(path) == [{"a": "5"}]


def test_what_is_said_of_small_settings():
    found = {
        name: group_of(name, top1)
        for name, top1 in {"a": 50, "a + LightNL": 51.5, "a found": 53, "b": 60, "b + LightNL": 59}.items()
    }
    lightnl, search = gains(found)
    assert lightnl == (
        "- LightNL is better than MobileNetV2 in 1 of 2 settings"
        " (one run each: too few to say of one setting), in points: a +1.50, b -1.00."
    )
    assert search == (
        "- The search is better than MobileNetV2-LightNL in 1 of 1 settings"
        " (one run each: too few to say of one setting), in points: a +1.50."
    )
    assert gains({"a": found["a"]}) == []


def test_what_random_networks_like():
    """Top-1 falls with every LightNL block, rises with every other, and has nothing to do with SE. By Fisher, of four
    networks: tanh(atanh(r) ± 1.96)."""
    blocks = ["a_nl b_se c d", "a_nl b_nl c", "a_nl b_nl c", "a_nl b_nl c_nl_se"]
    liked = what_random_networks_like(Group("random", [59.0, 58.5, 57.5, 57.0], [{"blocks": one} for one in blocks]))
    assert liked["lightnl"] == "-0.89 (-1.00 to 0.47)"
    assert liked["se"] == "0.00 (-0.96 to 0.96)"
    assert (liked["n"], liked["fewest"], liked["most"]) == (4, 1, 3)


def test_a_found_network_with_something_else_in_place_of_its_lightnl(tmp_path):
    spec = resolve("autonl_s")
    architectures = tmp_path / "architectures.json"
    architectures.write_text(json.dumps({"search": spec_to_dict(spec)}))
    setup = Setup("", "", tmp_path, architectures)
    whole, bare, energy = (
        network_of(Job("search", "", 0, name, needs="search"), setup)
        for name in ("found", "found+none", "found+lightnl_energy")
    )
    assert whole == spec
    assert [dataclasses.replace(block, lightnl=None) for block in spec.blocks] == list(bare.blocks)
    assert (energy.blocks, energy.operator) == (spec.blocks, "lightnl_energy")


@torch.no_grad()
def test_what_is_seen_of_a_branch():
    """x of ones, one channel: G = 1, y = 1, and a kernel of 1 in its middle leaves u = 1. The BN normalises that to
    (1 - 0.5) / 0.25 = 2 and makes 3 * 2 + 1 = 7 of it; an image of twos has u = 8, 30 and 91."""
    block = LightNL(1, ratio=1.0, stride=1).eval()
    block.depthwise.weight.zero_()[0, 0, 1, 1] = 1
    block.bn.running_mean.fill_(0.5)
    block.bn.running_var.fill_(0.25**2 - block.bn.eps)
    block.bn.weight.fill_(3)
    block.bn.bias.fill_(1)
    watch = Watch(block)
    block(torch.tensor([1.0, 2.0]).view(2, 1, 1, 1).expand(2, 1, 4, 4))
    assert watch.normalised[0].tolist() == pytest.approx([2, 30], rel=1e-4)
    assert watch.branch[0].tolist() == pytest.approx([7, 91 / 2], rel=1e-4)


def test_the_document_is_what_the_rows_say():
    assert DOC.read_text() == document.document(), "run python -m benchmarks.evidence.document"
    for path, drawing in document.figures().items():
        assert path.read_bytes() == drawing, "run python -m benchmarks.evidence.document"


def test_what_was_not_run_is_told(monkeypatch):
    jobs = [*(Job("made", "a", seed) for seed in range(3)), Job("made", "a: search", 5), Job("made", "b", 0)]
    monkeypatch.setattr(document, "SUITES", {"made": lambda: jobs, "whole": lambda: jobs[:1]})
    monkeypatch.setattr(document, "read", lambda suite: [{"job": "a", "seed": "0"}])
    assert document.not_run() == ["## What was not run", "", "- `made`: a (seed 1, 2); b (seed 0).", ""]


def test_random_networks_that_no_choice_was_made_by():
    rows = [{"job": "random", "seed": str(seed), "top1": str(50 + seed)} for seed in (4, 5, 9, 14)]
    (group,) = document.unseen(groups(rows, "top1")["random"]).values()
    assert group.values == [55, 59, 64]


@pytest.mark.parametrize(
    ("line", "suite", "job"),
    [
        ("MobileNetV2", "gain", "MobileNetV2"),
        ("with LightNL's branch, without the affinity", "gain", "+ control"),
        ("with SE", "gain", "+ SE"),
        ("MobileNetV2-LightNL", "gain", "+ LightNL"),
        ("random networks of the search space", "search", "random"),
        ("found by a search with `--trials 20`", "search", "found with trials at 64 px"),
    ],
)
def test_the_readme_says_what_the_rows_say(line, suite, job):
    group = groups(read(suite), "top1")[job]
    told = f"| {line} | {group.mean:.1f} ± {group.error:.1f} | {len(group.values)} |"
    assert told in (DOC.parents[1] / "README.md").read_text()


def test_the_readme_says_what_the_energy_does():
    """And what the gates alone do: where the results are not what one would wish for."""
    found, gain = groups(read("search"), "top1"), groups(read("gain"), "top1")
    told = " ".join((DOC.parents[1] / "README.md").read_text().split())
    before, after = (f"{found[name].mean:.1f} ± {found[name].error:.1f}" for name in ("AutoNL-L", "AutoNL-L by energy"))
    assert f"AutoNL-L goes from {before} to {after} (n = 2 each, too few to say)" in told
    trials = "found with trials at 64 px"
    pairs = (
        ("AutoNL-S", found["AutoNL-S by energy"], found["AutoNL-S"]),
        ("the found networks", found[f"{trials}, then LightNL by energy"], found[trials]),
        ("MobileNetV2", gain["+ LightNL by energy"], gain["+ LightNL"]),
    )
    for name, better, worse in pairs:
        assert f"{name} ({better.mean - worse.mean:+.1f})".replace("-0.0", "0.0") in told
    assert (
        f"come to {found['found'].mean:.1f} ± {found['found'].error:.1f} (n = 3, by an earlier version of it)" in told
    )
    without = found[f"{trials}, without LightNL"]
    assert f"comes to {without.mean:.1f} ± {without.error:.1f} (n = 3) without LightNL in its space" in told
    voc = groups(read("segmentation"), "miou")
    assert f"{voc['+ LightNL'].mean - voc['MobileNetV2'].mean:+.1f} mIoU (n = 5 each): not shown" in told


@pytest.mark.parametrize(
    ("told", "plain"),
    [
        *(("0.35 at 96 px", "96 px x 035"), ("0.5 at 96 px", "050"), ("0.5 at 128 px", "128 px x 050")),
        *(("0.5 at 192 px", "192 px x 050"), ("1.0 at 128 px", "128 px x 100"), ("1.4 at 96 px", "140")),
    ],
)
def test_the_readme_has_the_widths(told, plain):
    found = groups(read("widths"), "top1")
    searched = found.get(f"{plain} found")
    values = (found[plain].mean, found[f"{plain} + LightNL"].mean)
    row = f"| {told} | {values[0]:.1f} | {values[1]:.1f} | {f'{searched.mean:.1f}' if searched else '-'} |"
    assert row in (DOC.parents[1] / "README.md").read_text()


def test_the_queue_runs_what_is_missing_in_the_order_of_needs(tmp_path, monkeypatch):
    """Jobs are stood in for by a process that writes a row; one of them dies."""
    jobs = [
        Job("gain", "second", 0, needs="gain/first/0"),
        Job("gain", "first", 0),
        Job("gain", "dies", 0),
        Job("gain", "waits for what died", 0, needs="gain/dies/0"),
        Job("gain", "there already", 0),
    ]
    setup = Setup("", "", tmp_path / "runs", tmp_path / "a.json", at_once=2)
    append(tmp_path, dict.fromkeys(COLUMNS, "") | {"suite": "gain", "job": "there already", "seed": 0})
    started = []
    start = subprocess.Popen

    def fake(command, **more):
        (job,) = (job for job in jobs if job.key == command[-1])
        started.append(job.name)
        row = dict.fromkeys(COLUMNS, "") | {"suite": "gain", "job": job.name, "seed": 0}
        code = f"import sys, pathlib; pathlib.Path({str(row_file(setup, job))!r}).write_text({json.dumps(row)!r})"
        return start([sys.executable, "-c", "raise SystemExit(3)" if job.name == "dies" else code], **more)

    monkeypatch.setattr(subprocess, "Popen", fake)
    arguments = type("Arguments", (), {"max_minutes": 1.0, "out": tmp_path, "fill": False})
    queue(jobs, setup, arguments)
    assert started == ["first", "dies", "second"]
    assert keys(tmp_path, "gain") == {"gain/there already/0", "gain/first/0", "gain/second/0"}


@pytest.mark.parametrize(
    ("minutes", "fill", "jobs_done", "stopped"),
    [(5.2, False, 2, 0), (5.3, False, 3, 0), (6.8, False, 3, 0), (7.2, False, 4, 0), (5.2, True, 2, 2)],
)
def test_the_queue_starts_what_can_end_in_time(minutes, fill, jobs_done, stopped, tmp_path, monkeypatch):
    """By hand: two jobs on a GPU take 200 s, one alone 100, for which 115 have to be left: to 315 s there is time for
    a third one, until 415 for a fourth one after it, until 430 (7.17 minutes) for both at once."""
    told_to_stop = []
    clock = [0.0]
    jobs = [Job("gain", f"job {number}", 0) for number in range(4)]
    setup = Setup("", "", tmp_path / "runs", tmp_path / "a.json", at_once=2)
    working: dict[str, float] = {}

    class Process:
        returncode = 0

        def __init__(self, command, **more):
            self.key = command[-1]
            working[self.key] = 100.0

        def poll(self):
            if working.get(self.key, 0) > 0.01:
                return None
            (job,) = (job for job in jobs if job.key == self.key)
            row = dict.fromkeys(COLUMNS, "") | {"suite": "gain", "job": job.name, "seed": 0}
            row_file(setup, job).write_text(json.dumps(row))
            working.pop(self.key, None)
            return self.returncode

        def terminate(self):
            told_to_stop.append(self.key)
            self.returncode = -signal.SIGTERM
            working[self.key] = 0

    def sleep(seconds):
        clock[0] += 1
        for key in working:
            working[key] -= 1 / len(working)

    monkeypatch.setattr(subprocess, "Popen", Process)
    monkeypatch.setattr(
        "benchmarks.evidence.__main__.time", SimpleNamespace(perf_counter=lambda: clock[0], sleep=sleep)
    )
    queue(jobs, setup, type("Arguments", (), {"max_minutes": minutes, "out": tmp_path, "fill": fill}))
    assert (len(keys(tmp_path, "gain")), len(told_to_stop)) == (jobs_done, stopped)


def test_a_row_brings_the_curve_of_its_training(tmp_path):
    """What an epoch did not measure stays empty: the job's own top-1 is that of its end."""
    history = [
        {"epoch": 1, "train_loss": 2.5, "seconds": 1.0, "images_per_second": 9.0, "lr": 0.1},
        {"epoch": 2, "train_loss": 1.25, "seconds": 1.0, "images_per_second": 9.0, "val_loss": 1.5, "top1": 40.0},
    ]
    row = dict.fromkeys(COLUMNS, "") | {"suite": "gain", "job": "one", "seed": 3, "top1": 40.0} | course(history)
    append(tmp_path, row)
    kept = read_rows(tmp_path / "evidence_curves.csv")
    known = ("job", "seed", "epoch", "train_loss", "val_loss", "top1", "miou")
    assert [tuple(line[column] for column in known) for line in kept] == [
        ("one", "3", "1", "2.5", "", "", ""),
        ("one", "3", "2", "1.25", "1.5", "40", ""),
    ]
    assert [line["top1"] for line in read_rows(tmp_path / "evidence_gain.csv")] == ["40.0"]


def test_gain_runs_end_to_end_on_made_images():
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.evidence", "gain", "--smoke"], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines()[-1] == "6 rows"
