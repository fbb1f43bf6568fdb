"""arch.yaml and block strings: a round trip is exact, anything else is the one error."""

from dataclasses import replace
from importlib import resources

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from autonl import AutoNLError
from autonl.arch.codec import (
    block_from_string,
    block_to_string,
    read_arch,
    resolution_from,
    spec_from_dict,
    spec_to_dict,
    write_arch,
)
from autonl.arch.spec import ACTIVATIONS, OPERATORS, ArchSpec, BlockSpec, LightNLSpec
from autonl.arch.zoo import FAMILIES, ZOO, zoo_arch
from tests.conftest import prove

ratios = st.floats(min_value=1e-6, max_value=1)
blocks = st.builds(
    BlockSpec,
    kernel=st.sampled_from([3, 5, 7, 9, 11]),
    stride=st.sampled_from([1, 2]),
    expand=st.integers(1, 64),
    out_chs=st.integers(1, 100).map(lambda n: 8 * n),
    se=st.just(0.0) | ratios,
    lightnl=st.none() | st.builds(LightNLSpec, ratio=ratios, stride=st.integers(1, 64)),
)
specs = st.builds(
    ArchSpec,
    name=st.text(st.characters(categories=["L", "N", "P"]), min_size=1, max_size=20),
    blocks=st.lists(blocks, min_size=1, max_size=5).map(tuple),
    resolution=st.tuples(st.integers(1, 600), st.integers(1, 600)),
    classes=st.integers(1, 10_000),
    stem_chs=st.integers(1, 10).map(lambda n: 8 * n),
    activation=st.sampled_from(ACTIVATIONS),
    bn_eps=ratios,
    dropout=st.floats(0, 0.99),
    operator=st.sampled_from(OPERATORS),
)


def test_block_string_by_hand():
    text = "k5_s2_e6_c40_se0.5_nl0.25/1"
    block = BlockSpec(kernel=5, stride=2, expand=6, out_chs=40, se=0.5, lightnl=LightNLSpec(0.25, 1))
    assert block_from_string(text) == block
    assert block_from_string("nl0.25/1_c40_se0.5_e6_k5_s2") == block
    assert block_to_string(block) == text
    assert block_to_string(BlockSpec(3, 1, 1, 16)) == "k3_s1_e1_c16"


@settings(max_examples=prove(100, 5000))
@given(blocks)
def test_block_string_round_trip(block):
    assert block_from_string(block_to_string(block)) == block


@settings(max_examples=prove(50, 2000))
@given(specs)
def test_yaml_round_trip(spec):
    assert spec_from_dict(yaml.safe_load(yaml.safe_dump(spec_to_dict(spec)))) == spec


def test_numbers_as_people_write_them(tmp_path):
    (tmp_path / "arch.yaml").write_text(MINIMAL + "bn_eps: 1e-3\n")
    assert read_arch(tmp_path / "arch.yaml").bn_eps == 0.001


@pytest.mark.parametrize("name", ["1e5", "1.5", "2020-01-01", "no", "null"])
def test_a_name_that_could_be_something_else(name, tmp_path):
    write_arch(replace(zoo_arch("digits"), name=name), tmp_path / "arch.yaml")
    assert read_arch(tmp_path / "arch.yaml").name == name


@pytest.mark.parametrize("name", ZOO)
def test_file_round_trip(name, tmp_path):
    write_arch(zoo_arch(name), tmp_path / "arch.yaml")
    assert read_arch(tmp_path / "arch.yaml") == zoo_arch(name)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("k3_s1_e6_c24_x5", "unknown token 'x5'"),
        ("k3_s1_e6_c24_k5", "k is given twice"),
        ("k3_s1_c24", "e is missing"),
        ("k3_s1_e6_c24_nl0.25", "unknown token 'nl0.25'"),
        ("k3_s1_e6_c24_se0.25/2", "unknown token 'se0.25/2'"),
        ("k3_s1_e6_c24 ", "unknown token 'c24 '"),
        ("k3_s1_e6_c-24", "unknown token 'c-24'"),
        ("k\uff13_s1_e6_c24", "unknown token"),
        ("k3_s1_e6.5_c24", "expand: 6.5 is not allowed"),
        ("k4_s1_e6_c24", "kernel: 4 is not allowed; allowed: 3, 5, 7, 9, 11"),
        ("", "unknown token ''"),
        (7, "block: 7 is not allowed"),
    ],
)
def test_a_wrong_block_string_is_refused(text, message):
    with pytest.raises(AutoNLError) as error:
        block_from_string(text)
    assert message in str(error.value)


MINIMAL = "name: mine\nblocks: [k3_s1_e1_c16, k3_s2_e6_c24]\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (MINIMAL + "heads: 3\n", "unknown field 'heads'; did you mean head?"),
        (MINIMAL + "stem: 32\nstem: 16\n", "the field 'stem' is given twice"),
        (MINIMAL + "macs: 1\n", "macs: 1 is not allowed; allowed: 147693568, the figure recomputed"),
        (MINIMAL + "params: 77.0\n", "params: 77.0 is not allowed"),
        (MINIMAL + "resolution: 224x\n", "resolution: '224x' is not allowed"),
        (MINIMAL + "activation: [swish]\n", "activation: ['swish'] is not allowed; allowed: relu, relu6, swish"),
        (MINIMAL + "dropout: .nan\n", "dropout: nan is not allowed"),
        ("name: mine\nblocks: [k3_s1_e1_c16, k3_s2_e6_c20]\n", "blocks[1]: out_chs: 20 is not allowed"),
        ("name: mine\nblocks: k3_s1_e1_c16\n", "blocks: 'k3_s1_e1_c16' is not allowed; allowed: a list"),
        ("blocks: [k3_s1_e1_c16]\n", "the field name is missing"),
        ("[1, 2]", "architecture: 'list' is not allowed"),
        ("", "architecture: 'NoneType' is not allowed"),
        ("name: [", "not a YAML file"),
        ("name: 2001-99-99", "not a YAML file"),
        ("x: " + "[" * 5000, "not a YAML file"),
        ("!!python/object/apply:os.system ['true']", "not a YAML file"),
    ],
)
def test_a_wrong_file_is_refused_by_name(text, message, tmp_path):
    path = tmp_path / "arch.yaml"
    path.write_text(text)
    with pytest.raises(AutoNLError) as error:
        read_arch(path)
    assert str(error.value).startswith(f"{path}: ")
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_what_is_no_file_is_refused(tmp_path):
    (tmp_path / "binary").write_bytes(bytes(range(256)))
    for path in (tmp_path, tmp_path / "absent.yaml", tmp_path / "binary"):
        with pytest.raises(AutoNLError, match=str(path)):
            read_arch(path)


@pytest.mark.parametrize(
    ("value", "expected"), [(224, (224, 224)), ("96", (96, 96)), ("320x224", (320, 224)), ("1x1", (1, 1))]
)
def test_resolution(value, expected):
    assert resolution_from(value) == expected


@pytest.mark.parametrize("value", [0, -1, 2.5, True, "320X224", "a", "", "1x2x3", None, "99999999"])
def test_a_wrong_resolution_is_refused(value):
    with pytest.raises(AutoNLError, match="resolution: "):
        resolution_from(value)


JUNK = ["", "0", "-1", "9" * 30, ".5", "nl", "_", "k", "\n", ": ", "- ", "&a ", "*a", "\t", "\xe9", "\x00", "1e999"]


@st.composite
def mutated_files(draw):
    """A file of the zoo with one to three places cut out or overwritten."""
    text = (resources.files("autonl.arch.zoo") / f"{draw(st.sampled_from(sorted(FAMILIES)))}.yaml").read_text()
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(text)))
        junk = draw(st.sampled_from(JUNK) | st.text(max_size=4))
        text = text[:at] + junk + text[at + draw(st.integers(0, 12)) :]
    return text.encode("utf-8", "surrogatepass")


@settings(max_examples=prove(150, 6000))
@given(mutated_files())
def test_a_mutated_file_loads_or_raises_the_one_error(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("mutated") / "arch.yaml"
    path.write_bytes(data)
    refused = ""
    try:
        spec = read_arch(path)
    except AutoNLError as error:
        refused = str(error)
    if refused:
        assert refused.startswith(f"{path}: ")
        assert "\n" not in refused
    else:  # what loads is whole: it is written and read back as itself
        write_arch(spec, path)
        assert read_arch(path) == spec
