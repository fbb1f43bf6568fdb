"""A training of which rank 1 is killed in the eighth step, once: `torchrun -m tests.train.dying_rank IMAGES RUN`."""

import os
import signal
import sys

from autonl.train import run
from autonl.train.tasks import Classification
from tests.train.small import train_small


class Dying(Classification):
    def step(self, model, batch, step):
        if step == 7 and (os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]) == ("1", "0"):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(model, batch, step)


def train_dying(path, folder):
    run.Classification = Dying
    train_small(path, folder, data={"workers": 0}, resume=True)


if __name__ == "__main__":
    train_dying(*sys.argv[1:])
