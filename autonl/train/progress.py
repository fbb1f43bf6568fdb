"""What the loop reports to while it runs."""

from __future__ import annotations

from typing import Any


class Progress:
    """What the loop reports to; this one shows nothing."""

    def begin(self, steps: int, done: int, batch_size: int) -> None:
        """Training starts or goes on: so many optimiser steps in all, so many done."""

    def advance(self, step: int, scalars: dict[str, float]) -> None:
        """So many optimiser steps are done; the latest values of what the task reports."""

    def row(self, row: dict[str, Any]) -> None:
        """An epoch is done: its row of metrics.csv."""

    def say(self, message: str) -> None:
        """Something that a person should know; may come before `begin`."""

    def end(self) -> None:
        """Training is over, for whatever reason."""
