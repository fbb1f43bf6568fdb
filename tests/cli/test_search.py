"""`autonl search` as a user types it: its options, its errors, and Ctrl-C."""

import pytest

from autonl.search import run

DIGITS = ("search", "--data", "digits", "--space", "digits", "--recipe", "demo")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--trials", "-1"], "Invalid value for '--trials'"),
        (["--trials", "x"], "Invalid value for '--trials'"),
        (["--devices", "0"], "Invalid value for '--devices'"),
        (["--macs", "500%"], "500%"),
        (["--macs", "50%", "--cost-weight", "1"], "--macs and --cost-weight exclude each other"),
        (["--data", "/no/such"], "/no/such: no such folder"),
        (["--macs", "50%", "--set", "search.trial_resolution=4"], "search.trial_resolution: '4' is not allowed"),
    ],
)
def test_bad_input_is_one_line(autonl, tmp_path, arguments, message):
    code, out, err = autonl(*DIGITS, "--out", tmp_path / "run", *arguments)
    assert (code, out) == (2, "")
    assert len(err.strip().splitlines()) == 1
    assert message in err
    assert not (tmp_path / "run" / "run.yaml").exists()


def test_options_are_settings_and_ctrl_c_says_how_to_go_on(autonl, monkeypatch, tmp_path):
    given = []

    def interrupted(config, folder, **_):
        given.append(config.search)
        if len(given) > 1:
            folder.mkdir()
            (folder / "last.ckpt").touch()
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "search", interrupted)
    command = (*DIGITS, "--macs", "60%", "--trials", "20", "--out", str(tmp_path / "run"))
    code, _, err = autonl(*command)
    assert (code, err) == (130, "")  # nothing to go on from yet
    assert (given[0].macs, given[0].trials) == ("60%", 20)
    code, _, err = autonl(*command)
    assert code == 130
    assert err.startswith(f"stopped, saved in {tmp_path / 'run'}; go on with: autonl search --data digits")
    assert err.endswith(" --resume\n")
