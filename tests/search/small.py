"""A space and a search that take seconds."""

from pathlib import Path

import torch

from autonl.data.digits import digits
from autonl.data.sources import Source
from autonl.search.config import SearchConfig
from autonl.search.run import prepare, search
from autonl.search.space import Space
from autonl.train.config import load_config
from autonl.train.progress import Progress
from autonl.train.run import start
from tests.train.small import ON_CPU

TINY = Space(
    name="tiny",
    resolution="32",
    classes=10,
    stem=8,
    head=16,
    activation="relu6",
    bn_eps=1e-5,
    bn_momentum=0.1,
    first="k3_s1_e1_c8",
    stages=((16, 2, 2), (24, 2, 2)),
    expands=(2, 4),
    operator="lightnl",
)


def few_digits(images):
    """So many training images, evenly from all classes, and 200 to validate on."""
    train, validation = digits()
    kept, few = torch.arange(0, len(train), len(train) // images), torch.arange(0, len(validation), 5)
    return Source(tuple("0123456789"), train.subset(kept), validation.subset(few))


def prepared(config, folder, images):
    with start(config, folder, False, ON_CPU, Progress) as started:
        return prepare(started, config, TINY, few_digits(images), "")


def run_search(folder, *settings, space=TINY, images=400, resume=False, source=None, epochs=2, progress=Progress):
    settings = [
        "data.batch_size=16",
        f"schedule.epochs={epochs}",
        "schedule.warmup_epochs=0.5",
        "search.candidates=3",
        "search.trials=0",
        "search.calibrate_batches=2",
        "search.learned=1.0",
        "loop.checkpoint_steps=5",
        *settings,
    ]
    config = load_config("demo", settings, SearchConfig)
    source = source or few_digits(images)
    return search(config, Path(folder), space=space, source=source, resume=resume, where=ON_CPU, progress=progress)
