"""What the command `autonl` runs: the command line, once it is imported.

Importing torch takes seconds. Ctrl-C in them ends the command without a word, where Python would tell where in torch it
was. The package cannot do this itself: it imports torch before any of its modules.
"""

import signal


def main() -> None:
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:  # a command in the background of a script may have to ignore it
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from autonl.cli import main as command_line

    signal.signal(signal.SIGINT, before)
    command_line()
