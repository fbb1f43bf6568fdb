"""The processes that decode images, when the run is told to end."""

import multiprocessing
import os
import signal
import time

from autonl.data import loaders


def decode(ready):
    loaders.leave_signals_to_the_main_process(0)
    ready.set()
    while True:
        time.sleep(0.01)


def test_a_worker_outlives_the_signal_for_a_while_and_leaves_in_peace(monkeypatch):
    """Ignored for good, the main process would wait for it for ever at its own exit."""
    monkeypatch.setattr(loaders, "GRACE", 1)
    context = multiprocessing.get_context("fork")
    ready = context.Event()
    worker = context.Process(target=decode, args=(ready,), daemon=True)
    worker.start()
    assert ready.wait(30)
    os.kill(worker.pid, signal.SIGINT)
    worker.terminate()
    worker.join(0.3)
    assert worker.is_alive()
    worker.join(30)
    assert worker.exitcode == 0
