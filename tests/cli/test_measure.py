import sys

import pytest
from typer.testing import CliRunner

from autonl.cli import app

ARGUMENTS = ["measure", "--space", "digits", "--out", "table.csv"]


@pytest.mark.parametrize(
    ("measured", "told"),
    [(True, "stopped; go on with: autonl measure --space digits --out table.csv --resume"), (False, "stopped; before")],
)
def test_a_stop_says_how_to_go_on_and_a_pipe_gets_a_line_a_place(measured, told, tmp_path, monkeypatch):
    def measure(space, runtime, path, advance, **settings):
        advance(0, 3)
        if measured:
            path.touch()
            advance(1, 3)
        raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("autonl.latency_table.measure", measure)
    monkeypatch.setattr(sys, "argv", ["autonl", *ARGUMENTS])
    result = CliRunner().invoke(app, ARGUMENTS)
    assert result.exit_code == 130
    assert told in result.stderr
    assert ("1 of 3 places" in result.stderr) == measured
