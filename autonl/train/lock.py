"""A run folder is written by one process at a time."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

fcntl: Any
try:
    import fcntl
except ImportError:  # Windows: no lock
    fcntl = None

LOCK_FILE = ".lock"  # stays in the folder: two processes could hold a file that is taken away
HELD: set[Path] = set()  # by this process, to which the system would give a lock twice, and take both back at once


class Lock:
    """Of a run folder: until it is released, or the process ends in whatever way.

    lockf, not flock: the lock is the process's own, so a data worker that outlives it does not keep it.
    """

    def __init__(self, folder: Path) -> None:
        self.path = (folder / LOCK_FILE).absolute()
        self.descriptor: int | None = None

    def take(self) -> bool:
        """False: another process holds it, or another run of this one. No lock in a folder or a file system that does
        not let one be taken."""
        if not fcntl or self.descriptor is not None:
            return True
        if self.held_here():
            return False
        try:
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError:  # who writes the first file of the run says why
            return True
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(descriptor)
            return not isinstance(error, BlockingIOError | PermissionError)  # the two ways to say that it is held
        self.descriptor = descriptor
        HELD.add(self.path.resolve())
        return True

    def held_here(self) -> bool:
        """By another run of this process."""
        return self.descriptor is None and self.path.resolve() in HELD

    def release(self) -> None:
        if self.descriptor is not None:
            HELD.discard(self.path.resolve())
            os.close(self.descriptor)
            self.descriptor = None
