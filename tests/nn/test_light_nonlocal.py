"""LightNL against the equations with the explicit H W x H W matrix."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import autonl
from autonl import LightNL
from autonl.arch.macs import cheaper_order
from autonl.nn.kernels.layers import use_kernels
from autonl.nn.light_nonlocal import EPSILON, compact_nonlocal
from tests.conftest import prove

ORDERS = ("channel", "spatial")

# odd sizes, channels that are no multiple of 8, one compact channel, strides larger than the map
shapes = st.fixed_dictionaries(
    {
        "batch": st.integers(1, 3),
        "channels": st.integers(1, 40),
        "height": st.integers(1, 17),
        "width": st.integers(1, 17),
        "ratio": st.sampled_from([0.01, 0.125, 0.25, 0.5, 1.0]),
        "stride": st.sampled_from([1, 2, 3, 20]),
        "channels_last": st.booleans(),
        "seed": st.integers(0, 2**31),
    }
)


def draw_input(shape, dtype=torch.float32):
    generator = torch.Generator().manual_seed(shape["seed"])
    size = (shape["batch"], shape["channels"], shape["height"], shape["width"])
    x = torch.randn(size, generator=generator, dtype=torch.float64).to(dtype)
    return x.contiguous(memory_format=torch.channels_last) if shape["channels_last"] else x


def equation_9(x, compact_chs, stride):
    """y = x_c x_sc^T x_s / (H W) as written, positions as rows, in float64."""
    x = x.double()
    _, _, height, width = x.shape
    rows = x.flatten(2).mT  # (N, HW, C)
    sampled_rows = x[:, :, ::stride, ::stride].flatten(2).mT  # (N, S, C)
    affinity = rows[:, :, :compact_chs] @ sampled_rows[:, :, :compact_chs].mT / (height * width)  # (N, HW, S)
    return (affinity @ sampled_rows).mT.unflatten(2, (height, width))


def distance(out, expected):
    return ((out.double() - expected).norm() / expected.norm()).item()


@settings(max_examples=prove(150, 5000))
@given(shapes)
def test_both_orders_equal_the_equation(shape):
    x = draw_input(shape)
    compact_chs = LightNL(shape["channels"], shape["ratio"], shape["stride"]).compact_chs
    assert compact_chs == max(1, int(shape["ratio"] * shape["channels"]))
    expected = equation_9(x, compact_chs, shape["stride"])
    for order in (*ORDERS, None):
        assert distance(compact_nonlocal(x, compact_chs, shape["stride"], order), expected) <= 1e-6


@settings(max_examples=prove(40, 1000))
@given(shapes)
def test_divided_by_its_energy_it_grows_as_x_does(shape):
    x = draw_input(shape)
    stride = shape["stride"]
    compact_chs = LightNL(shape["channels"], shape["ratio"], stride).compact_chs
    positions = x.shape[2] * x.shape[3]
    for scale in (1e-3, 1, 30):
        sampled_x = scale * x[:, :compact_chs, ::stride, ::stride].double()
        sampled_energy = sampled_x.square().sum((1, 2, 3)) / (compact_chs * positions) + EPSILON
        expected = equation_9(scale * x, compact_chs, stride) / sampled_energy.view(-1, 1, 1, 1)
        for order in ORDERS:
            assert distance(compact_nonlocal(scale * x, compact_chs, stride, order, energy=True), expected) <= 1e-6


def test_maps_of_zeros_have_an_energy_too():
    x = torch.zeros(1, 8, 4, 4, requires_grad=True)
    compact_nonlocal(x, 2, 1, energy=True).sum().backward()
    assert torch.equal(x.grad, torch.zeros_like(x))


@settings(max_examples=prove(40, 1000))
@given(shapes)
def test_block_equals_the_equations(shape):
    torch.manual_seed(shape["seed"])
    x = draw_input(shape)
    block = trained(LightNL(shape["channels"], shape["ratio"], shape["stride"])).eval()
    y = equation_9(x, block.compact_chs, block.stride)
    weight, bn = block.depthwise.weight.double(), block.bn
    u = torch.nn.functional.conv2d(y, weight, padding=1, groups=shape["channels"])
    scale = bn.weight.double() / (bn.running_var.double() + bn.eps).sqrt()
    shift = bn.bias.double() - bn.running_mean.double() * scale
    branch = u * scale[:, None, None] + shift[:, None, None]  # Eq. 8 with its BN
    assert distance(block(x).detach(), branch + x.double()) <= 1e-6


@pytest.mark.parametrize("energy", [False, True])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("channels", "height", "width", "stride"), [(5, 4, 3, 1), (6, 5, 5, 2), (4, 2, 3, 4)])
def test_gradients(order, channels, height, width, stride, energy):
    block = trained(LightNL(channels, 0.5, stride, energy=energy)).double()
    block.order = order
    x = torch.randn(2, channels, height, width, dtype=torch.float64, requires_grad=True)
    parameters = dict(block.named_parameters())

    def run(x, *values):
        named = dict(zip(parameters, values, strict=True))
        return torch.func.functional_call(block, named, (x,))

    assert torch.autograd.gradcheck(run, (x, *(p.detach().requires_grad_() for p in parameters.values())))


def test_one_by_hand():
    # two channels on a 1 x 2 map, one compact channel: rows (1, 3) and (2, 4), x_c = (1, 2)
    x = torch.tensor([[[[1.0, 2.0]], [[3.0, 4.0]]]])
    # x_sc^T x_s = (1 * 1 + 2 * 2, 1 * 3 + 2 * 4) = (5, 11), over H W = 2; times x_c
    assert torch.allclose(compact_nonlocal(x, 1, 1), torch.tensor([[[[2.5, 5.0]], [[5.5, 11.0]]]]))
    # stride 2 keeps the first position alone: (1, 3), still over H W = 2
    assert torch.allclose(compact_nonlocal(x, 1, 2), torch.tensor([[[[0.5, 1.0]], [[1.5, 3.0]]]]))
    # |x_sc|^2 / (C_r H W) = 5 / 2, and 1 / 2 with stride 2
    assert torch.allclose(compact_nonlocal(x, 1, 1, energy=True), torch.tensor([[[[1.0, 2.0]], [[2.2, 4.4]]]]))
    assert torch.allclose(compact_nonlocal(x, 1, 2, energy=True), torch.tensor([[[[1.0, 2.0]], [[3.0, 6.0]]]]))


# the 112 x 112 map of a 224 px image, the maps of a 513 px one; "spatial" where its affinity is of a sane size
MAPS = [
    ("channel", 16, 112, 112, 2),
    ("channel", 16, 112, 112, 1),
    ("channel", 16, 257, 257, 2),
    ("channel", 24, 129, 129, 1),
    ("spatial", 40, 65, 65, 2),
    ("channel", 96, 33, 33, 1),
    ("spatial", 320, 17, 17, 1),
    *prove([], [("spatial", 16, 112, 112, 2), ("channel", 16, 257, 257, 1), ("channel", 320, 65, 65, 1)]),
]


@pytest.mark.parametrize("energy", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("order", "channels", "height", "width", "stride"), MAPS)
def test_half_precision_stays_in_range(order, channels, height, width, stride, dtype, energy):
    """At rms 4 the bare Gram matrix of a 112 x 112 map is beyond fp16. A constant gradient is the worst case."""
    torch.manual_seed(0)
    block = trained(LightNL(channels, 0.25, stride, energy=energy)).eval()
    block.order = order
    x = 4 * torch.randn(1, channels, height, width)
    for half, full in zip(forward_backward(block, x, dtype), forward_backward(block, x, None), strict=True):
        assert half.isfinite().all()
        assert distance(half, full.double()) <= 2e-2


def forward_backward(block, x, dtype):
    """Output, and the gradients of x and of every parameter, for an upstream gradient that is all of one sign."""
    x = (x if dtype is None else x.to(dtype)).detach().requires_grad_()
    with torch.autocast("cpu", dtype, enabled=dtype is not None):
        z = block(x)
    gradients = torch.autograd.grad(z, (x, *block.parameters()), torch.ones_like(z))
    return z.detach(), *gradients


def test_a_fresh_block_is_the_identity_in_both_modes():
    x = torch.randn(2, 12, 7, 5)
    block = LightNL(12)
    assert torch.equal(block.train()(x), x)
    assert torch.equal(block.eval()(x), x)


def test_nothing_of_positions_squared_is_made():
    """A 4096-position map: the affinity between positions would be 16.8 million numbers, x has 65,536."""
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            nonlocal largest
            out = function(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor):
                largest = max(largest, out.numel())
            return out

    x = torch.randn(1, 16, 64, 64)
    with Watch():
        LightNL(16, 0.25, 1)(x)
    assert largest == x.numel()


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("stride", [1, 2])
def test_no_hidden_copies(stride, order, memory_format, training):
    """Nothing is copied but the positions that a stride gathers, and z comes out in x's memory format."""
    block = LightNL(16, 0.25, stride).train(training).to(memory_format=memory_format)
    block.order = order
    x = torch.randn(2, 16, 14, 14).contiguous(memory_format=memory_format)
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=cpu, record_shapes=True, acc_events=True) as profile:
        z = block(x)
    sizes = [math.prod(e.input_shapes[0]) for e in profile.events() if e.name == "aten::copy_" and e.input_shapes[0]]
    gathered = {"channel": [2 * 16 * 49, 2 * 4 * 49], "spatial": [2 * 16 * 49]}[order]  # x_s, and x_sc in its scale
    assert sizes == (gathered if stride == 2 else [])
    assert z.stride() == x.stride()


def test_freezing_takes_the_cheaper_order_at_that_size():
    model = autonl.create_model("autonl_l")
    blocks = [m for m in model.modules() if isinstance(m, LightNL)]
    assert autonl.freeze_association(model, (224, 224)) is model
    small = [block.order for block in blocks]
    # the last block: 320 channels, 7 x 7
    assert small[-1] == cheaper_order(49, 49, 80, 320) == "spatial"
    assert small[0] == "channel"
    autonl.freeze_association(model, (513, 513))
    assert [block.order for block in blocks] == ["channel"] * len(blocks)
    autonl.freeze_association(model, None)
    assert {block.order for block in blocks} == {None}


@pytest.mark.parametrize("arguments", [{"ratio": 0}, {"ratio": 2}, {"stride": 0}, {"stride": 1.5}])
def test_wrong_arguments(arguments):
    with pytest.raises(autonl.AutoNLError, match=r"lightnl\."):
        LightNL(16, **arguments)


def trained(block):
    """Weights and statistics as after some training, so that the branch acts."""
    for tensor in (block.bn.weight, block.bn.bias, block.bn.running_mean):
        torch.nn.init.normal_(tensor)
    torch.nn.init.uniform_(block.bn.running_var, 0.5, 2)
    return block


def test_use_kernels_is_for_every_block():
    network = nn.Sequential(LightNL(8), nn.Sequential(nn.ReLU(), LightNL(8, energy=True)))
    use_kernels(network)
    assert [block.fused for block in network.modules() if isinstance(block, LightNL)] == [True, True]
