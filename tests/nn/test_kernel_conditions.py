"""Where the plain path is taken, whatever a GPU could do: no kernel runs here."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from timm.layers import BatchNormAct2d
from timm.models._features_fx import create_feature_extractor
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from autonl.nn import kernels
from autonl.nn.kernels import layers
from autonl.nn.kernels.layers import FusedDepthwise, FusedNormAct, use_layer_kernels
from autonl.nn.light_nonlocal import LightNL


def channels_last(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(shape, dtype=dtype).to(memory_format=torch.channels_last)


def gapped(value: Tensor) -> nn.Parameter:
    """The same values, not one behind the other."""
    return nn.Parameter(torch.stack([value.detach()] * 2, dim=-1)[..., 0])


def replaced(name: str, change: Callable) -> Callable:
    def replace(module: nn.Module) -> None:
        setattr(module, name, change(getattr(module, name)))

    return replace


# what BN of 8 channels the kernels do not know, LightNL's nor a layer's
NORMS = {
    "of other channels": lambda bn: bn.__init__(16),
    "without affine parameters": lambda bn: bn.__init__(8, affine=False),
    "without running statistics": lambda bn: bn.__init__(8, track_running_stats=False),
    "with a cumulative average": replaced("momentum", lambda _: None),
    "without a running mean": replaced("running_mean", lambda _: None),
    "without a count of batches": replaced("num_batches_tracked", lambda _: None),
    "with gaps in gamma": replaced("weight", gapped),
    "with gaps in beta": replaced("bias", gapped),
    "with gaps in the running mean": replaced("running_mean", lambda _: torch.zeros(16)[::2]),
    "with a variance elsewhere": replaced("running_var", lambda _: torch.ones(8, device="meta")),
    "on another device": replaced("weight", lambda weight: nn.Parameter(weight.to("meta"))),
}


@pytest.fixture
def any_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if any map could be worked on."""
    for module in (kernels, layers):
        monkeypatch.setattr(module, "can_run", lambda x, dtype: dtype in kernels.DTYPES)


def lightnl_takes(block: LightNL, x: Tensor) -> bool:
    return kernels.supported(x, block.depthwise, block.bn, block.compact_chs)


@pytest.mark.usefixtures("any_gpu")
@pytest.mark.parametrize("change", [None, *NORMS])
def test_a_norm_that_the_kernels_do_not_know(change: str | None) -> None:
    """Pruning, folding and moving leave such ones; kernels would read or write beside their memory."""
    block, layer = LightNL(8), nn.Sequential(BatchNormAct2d(8, act_layer=nn.SiLU))
    use_layer_kernels(layer)
    if change:
        NORMS[change](block.bn)
        NORMS[change](layer[0])
    x = channels_last(2, 8, 5, 5)
    assert [lightnl_takes(block, x), layer[0].takes(x)] == [not change] * 2


@pytest.mark.usefixtures("any_gpu")
def test_a_single_value_a_channel_is_left_to_batch_norm_which_refuses_it() -> None:
    layer = nn.Sequential(BatchNormAct2d(8))
    use_layer_kernels(layer)
    found = [
        (lightnl_takes(LightNL(8), x), layer[0].takes(x)) for x in (torch.zeros(1, 8, 1, 1), torch.zeros(2, 8, 1, 1))
    ]
    assert found == [(False, False), (True, True)]


def test_a_norm_is_found_by_the_names_of_its_tensors() -> None:
    """Not by their order, which pruning changes."""
    bn = nn.BatchNorm2d(8)
    for tensors in (bn._parameters, bn._buffers):
        for name in reversed(list(tensors)):
            tensors[name] = tensors.pop(name)
    found = kernels.norm_tensors(bn)
    names = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    assert [one is getattr(bn, name) for one, name in zip(found, names, strict=True)] == [True] * 5


@pytest.mark.usefixtures("any_gpu")
@pytest.mark.parametrize(
    ("change", "taken"),
    [
        (None, True),
        (replaced("weight", gapped), False),
        (replaced("weight", lambda weight: nn.Parameter(weight.to("meta"))), False),
        (replaced("bias", lambda _: nn.Parameter(torch.zeros(8))), False),
        (replaced("in_channels", lambda _: 16), False),
    ],
)
def test_a_depthwise_convolution_that_the_kernels_do_not_know(change: Callable | None, taken: bool) -> None:
    layer = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False))
    use_layer_kernels(layer)
    block, x = LightNL(8), channels_last(2, 8, 5, 5)
    if change:
        change(layer[0])
        change(block.depthwise)
    assert layer[0].takes(x) == taken
    if layer[0].bias is None and layer[0].in_channels == 8:
        assert lightnl_takes(block, x) == taken


@pytest.mark.usefixtures("any_gpu")
@pytest.mark.parametrize(
    ("x", "weight", "autocast", "taken"),
    [
        (torch.float32, torch.float32, False, True),
        (torch.bfloat16, torch.bfloat16, False, True),
        (torch.bfloat16, torch.float32, False, False),
        (torch.float32, torch.bfloat16, False, False),
        (torch.bfloat16, torch.float32, True, True),
        (torch.float32, torch.float32, True, True),
        (torch.float64, torch.float64, False, False),
        (torch.float64, torch.float32, True, False),
        (torch.float32, torch.float64, True, False),
    ],
)
def test_dtypes_are_taken_where_a_convolution_would_take_them(
    x: torch.dtype, weight: torch.dtype, autocast: bool, taken: bool
) -> None:
    """Its error is told by PyTorch; autocast leaves float64 as it is."""
    layer = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False))
    use_layer_kernels(layer.to(weight))
    before = torch.is_autocast_enabled("cuda")
    torch.set_autocast_enabled("cuda", autocast)
    try:
        assert layer[0].takes(channels_last(2, 8, 5, 5, dtype=x)) == taken
    finally:
        torch.set_autocast_enabled("cuda", before)


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ({}, FusedDepthwise),
        ({"kernel_size": 5, "padding": 2, "stride": 2}, FusedDepthwise),
        ({"padding": 0}, nn.Conv2d),
        ({"kernel_size": (3, 5), "padding": (1, 2)}, nn.Conv2d),
        ({"stride": 3}, nn.Conv2d),
        ({"dilation": 2, "padding": 2}, nn.Conv2d),
        ({"groups": 4}, nn.Conv2d),
        ({"out_channels": 16}, nn.Conv2d),
        ({"bias": True}, nn.Conv2d),
        ({"padding_mode": "reflect"}, nn.Conv2d),
    ],
)
def test_which_convolutions_are_changed(change: dict, kind: type) -> None:
    known = {"in_channels": 8, "out_channels": 8, "kernel_size": 3, "padding": 1, "groups": 8, "bias": False}
    network = nn.Sequential(nn.Conv2d(**(known | change)))
    use_layer_kernels(network)
    assert type(network[0]) is kind


def test_which_norms_are_changed() -> None:
    network = nn.Sequential(
        BatchNormAct2d(8),
        BatchNormAct2d(8, act_layer=nn.GELU),
        BatchNormAct2d(8, drop_layer=nn.Dropout),
        nn.BatchNorm2d(8),
    )
    use_layer_kernels(network)
    assert [type(layer) is FusedNormAct for layer in network] == [True, False, False, False]


@pytest.fixture
def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tensors that claim to be on a GPU."""
    monkeypatch.setattr(kernels, "HAS_TRITON", True)
    monkeypatch.setattr(kernels, "has_bfloat16", lambda device: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)


@pytest.mark.usefixtures("fake_gpu")
@pytest.mark.parametrize(
    ("shape", "can"),
    [
        ((2, 8, 5, 5), True),
        ((65535, 8, 5, 5), True),
        ((65536, 8, 5, 5), False),
        ((0, 8, 5, 5), False),
        ((2, 8, 0, 5), False),
        ((2, 2**15, 2**8, 2**8), False),
        ((8, 5, 5), False),
    ],
)
def test_maps_that_kernels_work_on(shape: tuple, can: bool) -> None:
    with FakeTensorMode(), torch.device("cuda"):
        x = torch.empty(shape)
    assert kernels.can_run(x, x.dtype) == can
    assert not kernels.can_run(x, torch.float64)


@pytest.mark.usefixtures("fake_gpu")
def test_functions_of_functions_take_the_plain_path() -> None:
    """torch.func sees no kernel: what it is given are wrappers, or wrapped parameters beside a plain map."""
    with FakeTensorMode(), torch.device("cuda"):
        x = torch.empty(2, 8, 5, 5)
    seen = []

    def function(value: Tensor) -> Tensor:
        seen.append(kernels.can_run(x, x.dtype))
        return value.sum()

    torch.func.grad(function)(torch.ones(2))
    torch.func.vmap(function)(torch.ones(2, 2))
    assert seen == [False, False]
    assert kernels.can_run(x, x.dtype)


@pytest.mark.usefixtures("any_gpu")
@pytest.mark.parametrize(("rows", "taken"), [(2**30 - 1, True), (2**30, False)])
def test_rows_that_can_be_counted(rows: int, taken: bool) -> None:
    layer = nn.Sequential(BatchNormAct2d(8))
    use_layer_kernels(layer.to("meta"))
    x = torch.empty(1, rows, 1, 8, device="meta").permute(0, 3, 1, 2)
    assert layer[0].takes(x) == taken


def test_features_are_extracted_from_changed_layers_too() -> None:
    """timm's tracing looks into layers that it does not know as leaves."""
    network = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False), BatchNormAct2d(8))
    use_layer_kernels(network)
    x = torch.randn(2, 8, 5, 5)
    features_of = create_feature_extractor(network, ["0", "1"])
    features = features_of(x)
    assert torch.equal(features["1"], network(x))
    assert [node.target for node in features_of.graph.nodes if node.op == "call_module"] == ["0", "1"]
