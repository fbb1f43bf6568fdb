"""`autonl models` and `autonl profile` as a user runs them."""

import json
import os
import subprocess
import sys

import pytest

from autonl.arch.codec import write_arch
from autonl.arch.zoo import ZOO, zoo_arch
from tests.arch.test_macs import PUBLISHED, TABLE_2


def test_profile_json(autonl):
    code, out, err = autonl("profile", "autonl_l", "--json")
    result = json.loads(out)
    assert (code, err) == (0, "")
    assert (result["name"], result["resolution"]) == ("autonl_l", 224)
    assert (result["macs"], result["params"]) == (352_108_448, 5_580_336)
    assert len(result["blocks"]) == 21 + 3
    for figure in ("macs", "params"):
        assert type(result[figure]) is int
        assert sum(row[figure] for row in result["blocks"]) == result[figure]
    assert result["blocks"][1 + 11]["block"] == "k3_s1_e3_c80_se0.5_nl0.125/2"


@pytest.mark.parametrize("name", PUBLISHED)
def test_profile_of_every_published_network(autonl, name):
    result = json.loads(autonl("profile", name, "--json")[1])
    assert (round(result["macs"] / 1e6, 2), result["params"]) == PUBLISHED[name]


@pytest.mark.parametrize(("operator", "millions"), TABLE_2.items())
def test_profile_with_an_operator(autonl, operator, millions):
    plain, with_operator = (
        json.loads(autonl("profile", "mobilenetv2_100", "--json", *more)[1])["macs"]
        for more in ((), ("--nl", operator))
    )
    assert round((with_operator - plain) / 1e6, 2) == millions


def test_profile_at_other_sizes(autonl):
    rectangle = json.loads(autonl("profile", "mobilenetv2_100", "--res", "320x224", "--json")[1])
    assert rectangle["resolution"] == "320x224"
    assert rectangle["blocks"][0]["height"] == 160
    assert rectangle["blocks"][0]["width"] == 112
    # the paper's very small settings
    small = json.loads(autonl("profile", "mobilenetv2_035", "--res", "96", "--json")[1])
    assert round(small["macs"] / 1e6, 2) == 11.93


@pytest.mark.parametrize("given", [["--runtime", "torch"], ["--threads", "1"], ["--rounds", "1"], ["--custom-op"]])
def test_what_is_for_latency_alone_is_refused_without_it(autonl, given):
    code, out, err = autonl("profile", "digits", *given)
    assert (code, out) == (2, "")
    assert f"{given[0]}: is for --latency, which is not given" in err


@pytest.mark.parametrize("runtime", ["torch", "executorch"])
def test_a_custom_operator_is_refused_where_there_is_none(autonl, runtime):
    code, out, err = autonl("profile", "digits", "--latency", "--runtime", runtime, "--custom-op")
    assert (code, out) == (2, "")
    assert err.endswith(
        f"'{runtime}' is not allowed; allowed: a custom operator with --runtime onnxruntime or openvino\n"
    )


def test_profile_of_a_run_folder_of_timms_network_has_its_classes(autonl, tmp_path):
    (tmp_path / "run.yaml").write_text("ref: timm:mobilenetv2_050\nmodel: {num_classes: 10}\n")
    ten = json.loads(autonl("profile", str(tmp_path), "--json")[1])
    thousand = json.loads(autonl("profile", "timm:mobilenetv2_050", "--json")[1])
    assert thousand["params"] - ten["params"] == (1280 + 1) * 990
    assert thousand["macs"] - ten["macs"] == 1280 * 990


def test_profile_of_timm_equals_the_closed_form(autonl):
    ours = json.loads(autonl("profile", "mobilenetv2_050", "--res", "160", "--json")[1])
    theirs = json.loads(autonl("profile", "timm:mobilenetv2_050", "--res", "160", "--json")[1])
    assert (theirs["macs"], theirs["params"]) == (ours["macs"], ours["params"])
    assert sum(row["macs"] for row in theirs["blocks"]) == theirs["macs"]
    inserted = json.loads(autonl("profile", "timm:mobilenetv2_050", "--nl", "lightnl", "--json")[1])
    assert inserted["macs"] == json.loads(autonl("profile", "mobilenetv2_lightnl_050", "--json")[1])["macs"]


def test_profile_for_people(autonl):
    code, out, _ = autonl("profile", "autonl_s")
    assert code == 0
    assert "k3_s1_e3_c40_nl0.25/2" in out
    assert "autonl_s at 224x224: 266.24M MACs, 4,389,350 parameters" in out


def test_models(autonl):
    rows = json.loads(autonl("models", "--json")[1])["models"]
    assert [row["name"] for row in rows] == list(ZOO)
    assert rows[list(ZOO).index("autonl_s")]["paper"] == {"macs": 267, "params": 4.4, "top1": 76.5, "top5": 93.1}
    out = autonl("models")[1]
    assert all(name in out for name in ZOO)
    assert "352.11" in out


def test_profile_of_a_file_and_of_a_run_folder(autonl, tmp_path):
    write_arch(zoo_arch("autonl_s"), tmp_path / "arch.yaml")
    for ref in (tmp_path, tmp_path / "arch.yaml"):
        assert json.loads(autonl("profile", ref, "--json")[1])["macs"] == 266_242_176


BAD = [
    (["profile", "autonl_x"], "unknown network"),
    (["profile", "runs/fond"], "runs/fond: no such run folder"),
    (["evaluate", "runs/fond"], "runs/fond: no such run folder"),
    (["profile", "nowhere/arch.yaml"], "nowhere/arch.yaml: cannot be read"),
    (["profile", "autonl_s", "--res", "big"], "resolution: 'big' is not allowed; allowed: a size such as 224"),
    (["profile", "autonl_s", "--res", "0"], "resolution: 0 is not allowed"),
    (["profile", "autonl_s", "--nl", "none"], "unknown operator 'none'; allowed: depthwise, eq3"),
    (["profile", "timm:nothing_like_it"], "unknown timm network 'nothing_like_it'"),
    (["profile", "timm:vit_tiny_patch16_224", "--res", "100"], "timm:vit_tiny_patch16_224 does not run at 100x100"),
    (["profile", "timm:resnet18", "--nl", "wang"], "ResNet has no inverted residuals"),
    (["profile"], "Missing"),
    (["profile", "autonl_s", "--foo"], "--foo"),
    (["nothing"], "No such command"),
]


@pytest.mark.parametrize(
    ("arguments", "message"), BAD, ids=lambda value: " ".join(value) if type(value) is list else ""
)
def test_bad_input_is_one_line_and_exit_code_2(autonl, arguments, message):
    code, out, err = autonl(*arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert err.startswith("autonl: ")
    assert err.count("\n") == 1


def test_a_wrong_figure_in_a_file_is_refused(autonl, tmp_path):
    path = tmp_path / "arch.yaml"
    write_arch(zoo_arch("autonl_s"), path)
    path.write_text(path.read_text().replace("macs: 266242176", "macs: 266242175"))
    code, _, err = autonl("profile", path)
    assert code == 2
    assert err == (
        f"autonl: {path}: macs: 266242175 is not allowed; allowed: 266242176, the figure recomputed from the blocks\n"
    )


def test_the_installed_command(tmp_path):
    """A process of its own, in an empty folder, its reader gone after one line."""
    command = [sys.executable, "-m", "autonl", "models", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["models"]
    reader, writer = os.pipe()
    os.close(reader)
    closed = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    assert (closed.returncode, closed.stderr) == (1, "")


def test_help_without_arguments_and_on_request(autonl):
    for arguments in ((), ("--help",), ("profile", "--help")):
        code, out, err = autonl(*arguments)
        assert (code, err) == (0, "")
        assert "Usage:" in out
        assert out.count("\n") > 5


def test_hostile_files(autonl, tmp_path):
    bomb = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
        f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 12)
    )
    (tmp_path / "bomb.yaml").write_text(bomb + "name: *a11\nblocks: *a11\n")
    (tmp_path / "value.yaml").write_text("blocks: [k3_s1_e1_c8]\nname: " + "&a [" * 40 + "]" * 40)
    (tmp_path / "huge.yaml").touch()
    os.truncate(tmp_path / "huge.yaml", 50 << 30)
    os.mkfifo(tmp_path / "pipe.yaml")
    for ref in (*tmp_path.iterdir(), "x" * 5000, ""):
        code, out, err = autonl("profile", ref)
        assert (code, out) == (2, "")
        assert err.count("\n") == 1
        assert len(err) < 1000 + len(str(ref))


def test_output_that_cannot_be_written():
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "autonl", "models", "--json"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (2, "autonl: output: No space left on device\n")


def test_a_segmentation_is_no_classifier(autonl, tmp_path):
    write_arch(zoo_arch("digits"), tmp_path / "arch.yaml")
    (tmp_path / "run.yaml").write_text("task: segmentation\n")
    code, _, err = autonl("profile", tmp_path, "--latency")
    assert code == 2
    assert "holds a segmentation, which is no classifier" in err
