"""The command `autonl` itself, before the command line takes over."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
INTERRUPTED = "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n"
CAUGHT = "import os, signal, sys\ndef main():\n    try: os.kill(os.getpid(), signal.SIGINT)\n"


@pytest.mark.parametrize(
    ("package", "command_line", "code"),
    [
        (INTERRUPTED, "def main(): print('here')\n", -signal.SIGINT),  # while torch is imported: not a word
        ("", CAUGHT + "    except KeyboardInterrupt: sys.exit(130)\n", 130),  # later the command line answers
    ],
)
def test_ctrl_c_is_never_a_traceback(package, command_line, code, tmp_path):
    stand_in = tmp_path / "autonl"
    stand_in.mkdir()
    (stand_in / "__init__.py").write_text(package)
    (stand_in / "cli.py").write_text(command_line)
    run = f"import sys; sys.path.append({str(ROOT)!r}); import autonl_command; autonl_command.main()"
    ended = subprocess.run([sys.executable, "-c", run], capture_output=True, text=True, cwd=tmp_path)
    assert (ended.returncode, ended.stdout, ended.stderr) == (code, "", "")


def test_who_was_told_to_ignore_ctrl_c_does(tmp_path):
    """A script's `autonl search ... &`."""
    stand_in = tmp_path / "autonl"
    stand_in.mkdir()
    (stand_in / "__init__.py").write_text(INTERRUPTED)
    (stand_in / "cli.py").write_text("def main():\n    import os; os.kill(os.getpid(), 2); print('done')\n")
    run = f"import sys; sys.path.append({str(ROOT)!r}); import autonl_command; autonl_command.main()"
    command = ["sh", "-c", 'trap "" INT; exec "$0" -c "$1"', sys.executable, run]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "done\n", "")
