import pytest

from autonl import AutoNLError
from autonl.arch.spec import ArchSpec, BlockSpec, LightNLSpec, divisible, map_sizes
from autonl.arch.zoo import zoo_arch

BLOCK = {"kernel": 3, "stride": 1, "expand": 6, "out_chs": 24}


@pytest.mark.parametrize(
    ("channels", "expected"),
    # the nearest multiple of 8; 11.2 would fall to 8, below 90 %, so it goes up
    [(32, 32), (33.6, 32), (11.2, 16), (44.8, 48), (3, 8), (22.4, 24), (60, 64)],
)
def test_divisible(channels, expected):
    assert divisible(channels) == expected


def test_scaled_keeps_everything_but_the_channels():
    half = zoo_arch("mobilenetv2_lightnl_050")
    full = zoo_arch("mobilenetv2_lightnl_100")
    assert half.name == "mobilenetv2_lightnl_050"
    assert (half.stem_chs, half.head_chs) == (16, 1280)
    assert zoo_arch("mobilenetv2_140").head_chs == 1792
    for small, large in zip(half.blocks, full.blocks, strict=True):
        assert (small.kernel, small.stride, small.expand, small.lightnl) == (
            large.kernel,
            large.stride,
            large.expand,
            large.lightnl,
        )


def test_lightnl_strides_follow_the_paper_at_224_and_stay_numbers():
    spec = zoo_arch("mobilenetv2_lightnl_100")
    sizes = map_sizes(spec, (224, 224))[1:]
    for block, (height, _) in zip(spec.blocks, sizes, strict=True):
        assert block.lightnl == LightNLSpec(0.25, 2 if height > 14 else 1)


def test_with_operator_keeps_found_places_and_fills_empty_networks():
    found = zoo_arch("autonl_l").with_operator("levi")
    assert [b.lightnl for b in found.blocks] == [b.lightnl for b in zoo_arch("autonl_l").blocks]
    filled = zoo_arch("mobilenetv2_100").with_operator("lightnl")
    assert filled.blocks == zoo_arch("mobilenetv2_lightnl_100").blocks


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("kernel", 4, "3, 5, 7, 9, 11"),
        ("kernel", 3.0, "3, 5, 7, 9, 11"),
        ("stride", 3, "1, 2"),
        ("stride", True, "1, 2"),
        ("expand", 0, "from 1 to 64"),
        ("expand", 2.5, "a whole number"),
        ("out_chs", 20, "a multiple of 8"),
        ("out_chs", -8, "a multiple of 8"),
        ("se", 1.5, "from 0 to 1"),
        ("se", float("nan"), "from 0 to 1"),
        ("se", "0.5", "from 0 to 1"),
        ("lightnl", (0.25, 1), "a LightNLSpec"),
    ],
)
def test_a_wrong_block_is_refused_by_field_value_and_allowed(field, value, allowed):
    with pytest.raises(AutoNLError) as error:
        BlockSpec(**(BLOCK | {field: value}))
    assert str(error.value).startswith(f"{field}: {value!r} is not allowed")
    assert allowed in str(error.value)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("name", ""),
        ("name", "two\nlines"),
        ("blocks", ()),
        ("resolution", (0, 224)),
        ("resolution", 224),
        ("classes", 0),
        ("stem_chs", 12),
        ("head_chs", "1280"),
        ("activation", "gelu"),
        ("bn_eps", 0),
        ("bn_momentum", float("inf")),
        ("dropout", 1.0),
        ("operator", "none"),
    ],
)
def test_a_wrong_architecture_is_refused(field, value):
    with pytest.raises(AutoNLError, match="is not allowed; allowed: "):
        ArchSpec(**({"name": "x", "blocks": (BlockSpec(**BLOCK),)} | {field: value}))


@pytest.mark.parametrize(("ratio", "stride"), [(0, 1), (1.1, 1), (0.25, 0), (0.25, 1.0)])
def test_a_wrong_compactness_is_refused(ratio, stride):
    with pytest.raises(AutoNLError, match=r"lightnl\.(ratio|stride): "):
        LightNLSpec(ratio, stride)
