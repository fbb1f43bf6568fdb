"""Settings are typed, and what is not understood is refused by name."""

import re

import pytest
import yaml

from autonl.errors import AutoNLError
from autonl.segment.config import SegmentConfig
from autonl.train.config import RECIPES, Config, from_dict, load_config, setting_names, to_dict


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_loads_and_survives_a_round_trip(recipe):
    kind = SegmentConfig if recipe == "voc" else Config
    config = load_config(recipe, (), kind)
    assert from_dict(kind, yaml.safe_load(yaml.safe_dump(to_dict(config)))) == config


def test_a_recipe_for_segmentation_is_no_other():
    with pytest.raises(AutoNLError, match="'voc' is a recipe for autonl segment; allowed: demo, few, "):
        load_config("voc")


def test_the_recipes_that_are_shipped():
    assert set(RECIPES) == {"demo", "few", "imagenet_mnas", "tiny_imagenet", "voc"}


def test_the_papers_recipe():
    """Section 4.1 of the paper; the TensorFlow form of RMSprop has its eps inside the root."""
    config = load_config("imagenet_mnas")
    assert (config.data.batch_size, config.data.image_size, config.data.interpolation) == (4096, 224, "bicubic")
    assert (config.optim.name, config.optim.lr, config.optim.momentum) == ("rmsproptf", 0.256, 0.9)
    assert config.optim.arguments == {"alpha": 0.9, "eps": 1e-3}
    assert (config.optim.weight_decay, config.optim.label_smoothing) == (1e-5, 0.1)
    assert (config.schedule.name, config.schedule.epochs, config.schedule.warmup_epochs) == ("step", 350, 5)
    assert (config.schedule.warmup_lr, config.schedule.decay_rate, config.schedule.decay_epochs) == (0.016, 0.97, 2.4)
    assert (config.model["drop_rate"], config.loop.ema) == (0.2, 0.9999)


@pytest.mark.parametrize(
    ("setting", "read"),
    [
        ("optim.lr=0.5", lambda c: c.optim.lr == 0.5),
        ("optim.lr=1", lambda c: c.optim.lr == 1.0 and type(c.optim.lr) is float),
        ("optim.weight_decay=1e-5", lambda c: c.optim.weight_decay == 1e-5),  # text to YAML
        ("data.mean=[0.5, 0.5, 0.5]", lambda c: c.data.mean == (0.5, 0.5, 0.5)),
        ("data.image_size=null", lambda c: c.data.image_size is None),
        ("data.path=2024", lambda c: c.data.path == "2024"),
        ("data.path=1e5", lambda c: c.data.path == "1e5"),
        ("optim.arguments.betas=[9e-1, 0.99]", lambda c: c.optim.arguments["betas"] == [0.9, 0.99]),
        ("model.pad_type=same", lambda c: c.model == {"pad_type": "same"}),
        ("optim.arguments.eps=0.001", lambda c: c.optim.arguments["eps"] == 0.001),
        ("optim.arguments.eps=1e-3", lambda c: c.optim.arguments["eps"] == 0.001),
        ("optim.arguments.eps=1.5E3", lambda c: c.optim.arguments["eps"] == 1500),
        ("optim.arguments.group={eps: .5e-1}", lambda c: c.optim.arguments["group"] == {"eps": 0.05}),
        ("optim.arguments={<<: {<<: {eps: 1, lr: 1}, eps: 2}}", lambda c: c.optim.arguments == {"eps": 2, "lr": 1}),
        ("loop.compile=true", lambda c: c.loop.compile is True),
        ("loop.precision=32", lambda c: c.loop.precision == "32"),
    ],
)
def test_a_setting_on_top(setting, read):
    assert read(load_config("demo", [setting]))


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("optim.lrr=1", "unknown setting 'optim.lrr'; did you mean optim.lr"),
        ("optm.lr=1", "unknown setting 'optm.lr'; did you mean optim.lr"),
        ("sed=1", "unknown setting 'sed'; did you mean seed"),
        ("optim=1", "unknown setting 'optim'"),
        ("optim.lr.x=1", "optim.lr"),
        ("optim.lr=fast", "optim.lr: 'fast' is not allowed; allowed: a number"),
        ("optim.lr=-1", "optim.lr"),
        ("optim.lr=nan", "optim.lr"),
        ("schedule.epochs=1.5", "schedule.epochs: 1.5 is not allowed; allowed: a whole number"),
        ("schedule.epochs=true", "schedule.epochs: True is not allowed"),
        ("schedule.epochs=0", "schedule.epochs"),
        ("schedule.name=linear", "schedule.name: 'linear' is not allowed; allowed: cosine"),
        ("loop.compile=1", "loop.compile: 1 is not allowed; allowed: true or false"),
        ("loop.precision=8", "loop.precision: '8' is not allowed; allowed: auto"),
        ("data.mean=0.5", "data.mean: 0.5 is not allowed; allowed: a list of numbers"),
        ("augment.scale=[0.1]", "augment.scale: [0.1] is not allowed; allowed: a list of 2 numbers"),
        ("augment.scale=[0.9, 0.1]", "augment.scale"),
        ("data.interpolation=cubic", "data.interpolation: 'cubic' is not allowed; allowed: bicubic"),
        ("model=same", "model: 'same' is not allowed; allowed: a mapping"),
        ("optim.lr", "--set: 'optim.lr' is not allowed; allowed: section.name=value"),
        ("optim.lr=[", "--set"),
        ("optim.arguments={eps: 1, eps: 2}", "--set optim.arguments: the field 'eps' is given twice; allowed: once"),
        ("optim.arguments.betas=&a [*a]", "optim.arguments: '...' is not allowed; allowed: values that are not"),
        ("data.path=2020-13-45", "--set: 'data.path=2020-13-45' is not allowed"),
        ("data.path=" + "[" * 5000, "--set"),
        ("data.std=[0.5, 0, 0.5]", "data.std: [0.5, 0.0, 0.5] is not allowed; allowed: three numbers above 0"),
        ("data.std=[0.5, .nan, 0.5]", "data.std"),
        ("schedule.warmup_lr=-1", "schedule.warmup_lr: -1.0 is not allowed; allowed: a number from 0"),
        ("schedule.min_lr=.nan", "schedule.min_lr"),
        ("schedule.decay_rate=-0.1", "schedule.decay_rate"),
    ],
)
def test_a_setting_that_is_refused(setting, message):
    with pytest.raises(AutoNLError, match=re.escape(message)):
        load_config("demo", [setting])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("optim: {lrr: 1}", "unknown setting 'optim.lrr'; did you mean optim.lr"),
        ("optim: 3", "optim: 3 is not allowed; allowed: a mapping"),
        ("[1, 2]", "allowed: a YAML mapping"),
        ("a: [", "not a YAML file"),
        ("a: " + "[" * 5000, "not a YAML file"),
        ("optim: {lr: 1}\nseed: 1\noptim: {lr: 2}", "the field 'optim' is given twice; allowed: once"),
    ],
)
def test_a_recipe_file_that_is_refused(tmp_path, text, message):
    """By its name, whatever stands on the command line; a setting there may mend it."""
    mine = str(tmp_path / "mine.yaml")
    (tmp_path / "mine.yaml").write_text(text)
    for settings in ((), ("optim.lr=1",)):
        with pytest.raises(AutoNLError, match=re.escape(message)) as refused:
            load_config(mine, settings)
        assert str(refused.value).startswith(f"{mine}: ")
    (tmp_path / "mine.yaml").write_text("optim: {lr: fast}")
    assert load_config(mine, ["optim.lr=1"]).optim.lr == 1
    with pytest.raises(AutoNLError, match=r"^unknown setting 'optim\.lrr'"):
        load_config(mine, ["optim.lrr=1"])


def test_a_recipe_that_is_not_there(tmp_path):
    with pytest.raises(AutoNLError, match=r"unknown recipe.*did you mean tiny_imagenet"):
        load_config("tiny_imagnet")
    with pytest.raises(AutoNLError, match="cannot be read"):
        load_config(str(tmp_path / "mine.yaml"))


def test_setting_names_reach_every_section():
    assert {"seed", "model", "data.path", "augment.flip", "optim.lr", "schedule.epochs", "loop.ema"} <= set(
        setting_names(Config)
    )
