"""Class activation maps, the affinities of LightNL, and the figures of both."""

import itertools
from dataclasses import replace

import matplotlib
import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from autonl import create_model, insert_lightnl
from autonl.arch.codec import block_from_string
from autonl.arch.spec import ArchSpec
from autonl.cam import affinities, affinity_row, class_activation_map, lightnl_blocks
from autonl.cam.affinity import Affinities
from autonl.cam.drawing import Panel, draw_affinities, draw_maps, heat_over, on_map, signs_over
from autonl.errors import AutoNLError
from autonl.models import resolve
from autonl.nn.light_nonlocal import LightNL, compact_nonlocal
from autonl.profile import profile
from tests.conftest import prove


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def with_life(model, images):
    """As after a training: LightNL is not the identity, no bias is zero, BN knows the statistics of the images."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            # LightNL's, zero at birth, stay small: its cube would leave all bounds in a network that never was trained
            nn.init.uniform_(module.weight, *((0.5, 1.5) if module.weight.any() else (0.05, 0.15)))
            module.momentum = 1.0
        if getattr(module, "bias", None) is not None:
            nn.init.normal_(module.bias, std=0.5)
    with torch.no_grad():
        model.train()(images)
    return model.eval()


# class activation maps

NETWORKS = {
    "digits": lambda: create_model("digits"),
    "mobilenetv2_lightnl_035": lambda: create_model("mobilenetv2_lightnl_035"),
    "autonl_s": lambda: create_model("autonl_s", num_classes=7),
    "timm:resnet": lambda: timm.create_model("test_resnet"),
    "timm:mobilenetv2 with LightNL": lambda: insert_lightnl(timm.create_model("mobilenetv2_035", num_classes=5)),
    "timm:swin, channels last": lambda: timm.create_model(
        "swin_tiny_patch4_window7_224", img_size=56, window_size=7, embed_dim=8, depths=(1, 1), num_heads=(1, 2)
    ),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_the_mean_of_a_map_and_the_bias_are_the_logit(name):
    size = 56 if "swin" in name else 64
    images = torch.randn(4, 3, size, size)
    model = with_life(NETWORKS[name](), images)
    classes = torch.tensor([[0, 3, 4], [2, 1, 0], [0, 1, 2], [4, 3, 2]])
    maps, logits = class_activation_map(model, images, classes)
    assert maps.shape[:2] == (4, 3)
    torch.testing.assert_close(logits, model(images), rtol=1e-4, atol=1e-5)
    bias = model.get_classifier().bias[classes]
    torch.testing.assert_close(maps.mean((2, 3)) + bias, logits.gather(1, classes), rtol=1e-4, atol=1e-5)


class Bare(nn.Module):
    """The image is the map of features; two channels, two classes."""

    def __init__(self, pool=lambda x: x.mean((2, 3))):
        super().__init__()
        self.pool, self.classifier = pool, nn.Linear(2, 2)
        self.classifier.weight.data = torch.tensor([[1.0, -2.0], [0.5, 3.0]])
        self.classifier.bias.data = torch.tensor([10.0, 20.0])

    def forward_features(self, x):
        return x

    def forward_head(self, x):
        return self.classifier(self.pool(x))

    def get_classifier(self):
        return self.classifier


IMAGE = torch.tensor([[[[1.0, 2.0], [3.0, 4.0]], [[0.0, 1.0], [0.0, -1.0]]]])  # (1, 2, 2, 2)


def test_a_map_by_hand():
    maps, logits = class_activation_map(Bare().eval(), IMAGE, [[0, 1]])
    assert maps.tolist() == [[[[1.0, 0.0], [3.0, 6.0]], [[0.5, 4.0], [1.5, -1.0]]]]
    assert logits.tolist() == [[12.5, 21.25]]
    assert torch.equal(class_activation_map(Bare().eval(), IMAGE).maps, maps[:, 1:])  # the predicted class


REFUSED = {
    "numbers that are none": (Bare, IMAGE * torch.inf, "logits are not finite"),
    "max pooling": (lambda: Bare(lambda x: x.amax((2, 3))), IMAGE, "means of its maps are not its logits"),
    "a convolution behind the pooling": (lambda: timm.create_model("mobilenetv3_small_050"), None, "288 channels"),
    "tokens": (lambda: timm.create_model("test_vit"), None, "no map over the image"),
    "a norm behind the pooling": (lambda: timm.create_model("test_convnext"), None, "means of its maps"),
    "no classifier": (lambda: timm.create_model("test_resnet", num_classes=0), None, "its classifier is Identity"),
    "a backbone": (lambda: create_model("digits", features_only=True), None, "has no forward_features"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_other_heads_are_refused(case):
    make, images, reason = REFUSED[case]
    if images is None:
        images = torch.randn(2, 3, 160, 160)
        model = with_life(make(), images)
    else:
        model = make().eval()
    with pytest.raises(AutoNLError, match="no class activation map") as refused:
        class_activation_map(model, images)
    assert reason in str(refused.value)


def test_training_mode_and_unknown_classes_are_refused():
    with pytest.raises(AutoNLError, match="eval mode"):
        class_activation_map(Bare(), IMAGE)
    for wrong in ([2], [-1]):
        with pytest.raises(AutoNLError, match="classes 0 to 1"):
            class_activation_map(Bare().eval(), IMAGE, wrong)


def crosses_and_rings(count, seed):
    """Images of noise with a cross (0) or a ring (1) of 11 px in one quadrant: (images, labels, quadrants)."""
    generator = torch.Generator().manual_seed(seed)
    rows, columns = torch.meshgrid(torch.arange(11) - 5, torch.arange(11) - 5, indexing="ij")
    cross = (rows == columns) | (rows == -columns)
    ring = ((rows**2 + columns**2).float().sqrt() - 4).abs() < 0.7
    images = 0.3 * torch.randn(count, 1, 32, 32, generator=generator)
    labels, quadrants = (torch.randint(high, (count,), generator=generator) for high in (2, 4))
    for image, label, quadrant in zip(images, labels, quadrants, strict=True):
        down, right = divmod(int(quadrant), 2)
        image[0, 16 * down + 2 : 16 * down + 13, 16 * right + 2 : 16 * right + 13] += 2.0 * (cross, ring)[int(label)]
    return images.expand(-1, 3, -1, -1), labels, quadrants


def test_the_peak_is_in_the_quadrant_of_the_only_evidence():
    blocks = tuple(map(block_from_string, ("k3_s1_e1_c8", "k3_s2_e2_c16_nl0.5/1", "k3_s1_e2_c16")))
    model = create_model(ArchSpec("small", blocks, (32, 32), classes=2, stem_chs=8, head_chs=32, dropout=0.0))
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    images, labels, _ = crosses_and_rings(2048, 0)
    for step in range(96):
        batch = slice(step % 32 * 64, step % 32 * 64 + 64)
        loss = F.cross_entropy(model(images[batch]), labels[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()
    images, labels, quadrants = crosses_and_rings(200, 1)
    maps, logits = class_activation_map(model, images, labels)  # (N, 1, 8, 8)
    assert (logits.argmax(1) == labels).float().mean() >= 0.95
    peaks = maps.flatten(1).argmax(1)
    found = peaks // 8 // 4 * 2 + peaks % 8 // 4
    assert (found == quadrants).float().mean() >= 0.95


# affinities


@settings(max_examples=prove(30, 1000))
@given(
    st.integers(1, 12),
    st.integers(1, 9),
    st.integers(1, 9),
    st.sampled_from([1, 2, 3]),
    st.integers(0, 2**31),
    st.data(),
)
def test_a_row_is_that_of_the_explicit_matrix(channels, height, width, stride, seed, data):
    compact_chs = data.draw(st.integers(1, channels))
    position = data.draw(st.integers(0, height - 1)), data.draw(st.integers(0, width - 1))
    x = torch.randn(channels, height, width, generator=torch.Generator().manual_seed(seed))
    row = affinity_row(x, position, compact_chs, stride)
    assert row.shape == (-(-height // stride), -(-width // stride))

    exact = x.double()
    x_c = exact[:compact_chs].flatten(1)  # (Cr, HW)
    x_s = exact[:, ::stride, ::stride].flatten(1)  # (C, S)
    matrix = x_c.mT @ x_s[:compact_chs] / (height * width)  # (HW, S)
    wanted = matrix[position[0] * width + position[1]]
    # relative to the factors, as a row may cancel to nearly nothing
    scale = x_c[:, position[0] * width + position[1]].norm() * x_s[:compact_chs].norm() / (height * width)
    assert (row.flatten() - wanted).norm() <= 1e-6 * scale
    # and they are the weights of Eq. 9
    y = compact_nonlocal(exact[None], compact_chs, stride)[0][:, position[0], position[1]]
    torch.testing.assert_close(x_s @ wanted, y)
    # those of lightnl_energy too, where the map may be so small that its epsilon counts
    exact = exact * 10.0 ** (seed % 5 - 3)
    y = compact_nonlocal(exact[None], compact_chs, stride, energy=True)[0][:, position[0], position[1]]
    row = affinity_row(exact, position, compact_chs, stride, energy=True)
    torch.testing.assert_close(exact[:, ::stride, ::stride].flatten(1) @ row.flatten(), y, rtol=1e-5, atol=1e-7)


def test_the_rows_of_a_network_by_energy():
    image = torch.randn(1, 3, 32, 32)
    model = with_life(create_model(replace(resolve("digits"), operator="lightnl_energy")), image)
    kept = {}
    hook = lightnl_blocks(model)[3].register_forward_hook(lambda m, inputs, output: kept.update(x=inputs[0][0]))
    (looked,) = affinities(model, image, [(0, 0)], [3])
    hook.remove()
    lightnl = lightnl_blocks(model)[3]
    expected = affinity_row(kept["x"], (0, 0), lightnl.compact_chs, lightnl.stride, energy=True)
    torch.testing.assert_close(looked.rows[0], expected)


def test_nothing_of_hw_x_hw_is_made():
    """The explicit matrix would have 2**36 entries."""
    x = torch.randn(4, 512, 512)
    assert affinity_row(x, (100, 7), 2, 1)[100, 7] == pytest.approx(float(x[:2, 100, 7].square().sum()) / 2**18)


@pytest.mark.parametrize("name", ["digits", "mobilenetv2_lightnl_035", "autonl_s", "autonl_l", "mobilenetv2_035"])
def test_blocks_are_numbered_as_by_profile(name):
    rows = [row for row in profile(name).blocks if row["name"].startswith("block ")]
    wanted = [int(row["name"].split()[1]) for row in rows if row["nonlocal_macs"]]
    with torch.device("meta"):
        found = lightnl_blocks(create_model(name))
    assert list(found) == wanted
    assert [m.stride for m in found.values()] == [b.lightnl.stride for b in resolve(name).blocks if b.lightnl]


def test_affinities_of_a_network():
    image = torch.randn(1, 3, 96, 160)
    model = with_life(create_model("mobilenetv2_lightnl_035"), image)
    kept = {}
    for number, lightnl in lightnl_blocks(model).items():
        lightnl.register_forward_hook(
            lambda m, inputs, output, number=number: kept.update({number: (inputs[0], output)})
        )
    positions = [(0, 0), (159, 95), (80, 31)]
    first, last = affinities(model, image, positions, [1, 16])
    assert (first.map_size, first.stride, last.map_size, last.stride) == ((24, 40), 2, (3, 5), 1)
    # pixel x, y -> row, column of a map of 24 x 40 and of 3 x 5
    for looked, places in ((first, [(0, 0), (23, 39), (7, 20)]), (last, [(0, 0), (2, 4), (0, 2)])):
        before, after = kept[looked.block]
        compact_chs = lightnl_blocks(model)[looked.block].compact_chs
        sampled = before[0, :compact_chs, :: looked.stride, :: looked.stride].flatten(1)
        for row, place in zip(looked.rows, places, strict=True):
            wanted = before[0, :compact_chs, *place] @ sampled / (before.shape[2] * before.shape[3])
            torch.testing.assert_close(row.flatten(), wanted)
        assert looked.share == pytest.approx(float((after - before).norm() / before.norm()))
        assert looked.share > 0
    assert not any(m._forward_hooks for m in create_model("digits").modules())


def test_one_block_a_map_size_is_shown_unless_asked():
    model = create_model("digits").eval()
    looked = affinities(model, torch.randn(1, 3, 32, 32), [(3, 4)])
    assert [(block.block, block.map_size) for block in looked] == [(3, (8, 8)), (7, (4, 4))]
    assert [block.share for block in looked] == [0, 0]  # fresh blocks are the identity
    assert all(not block._forward_hooks for block in lightnl_blocks(model).values())


@pytest.mark.parametrize(
    ("network", "position", "blocks", "reason"),
    [
        (
            "digits",
            (32, 0),
            None,
            "position 32,0: outside of the 32x32 pixels that the network sees; allowed: x from 0",
        ),
        ("digits", (0, -1), None, "y from 0 to 31"),
        ("digits", (0, 0), [1, 2], "block 2: has no LightNL; allowed, numbered as by autonl profile: 1, 3, 4, 6, 7"),
        ("digits", (0, 0), [99], "block 99"),
        ("mobilenetv2_035", (0, 0), None, "none of the network's blocks has LightNL"),
        ("mobilenetv2_035", (0, 0), [3], "none of the network's blocks has LightNL"),
    ],
)
def test_places_that_are_not_there_are_refused(network, position, blocks, reason):
    with pytest.raises(AutoNLError, match=reason):
        affinities(create_model(network).eval(), torch.zeros(1, 3, 32, 32), [position], blocks)


def test_a_stride_makes_cells_of_the_map():
    row = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    assert on_map(row, 2, (3, 4)).tolist() == [[1, 1, 2, 2], [1, 1, 2, 2], [3, 3, 4, 4]]
    assert torch.equal(on_map(row, 1, (2, 2)), row)


# figures

GREY = torch.full((3, 16, 16), 0.5)
HOSTILE = ["W" * 80, "a $name^{ with$ _ signs", "wort " * 60, "", "x"]


def panel(values, *title):
    return Panel(title or ("network", "prediction: x", "probability 1 %"), GREY, torch.as_tensor(values))


def test_maps_side_by_side_have_one_scale():
    low, high = [[0.0, 1.0], [1.0, 2.0]], [[0.0, 1.0], [1.0, 8.0]]
    figure = draw_maps(["image"], GREY, [[panel(low), panel(high)]])
    *panels, bar = figure.axes
    _, shown_low, shown_high = (np.asarray(axes.images[0].get_array()) for axes in panels)
    assert np.array_equal(shown_low[0, 0], shown_high[0, 0])  # the same value, the same colour
    assert np.array_equal(shown_low, heat_over(GREY, torch.tensor(low), 8.0))
    assert bar.get_xlim() == (0, 8)


def test_affinities_have_a_scale_around_zero():
    block = Affinities(3, torch.tensor([[[-1.0, 0.0], [0.5, 0.25]], [[0.0, 4.0], [0.0, 0.0]]]), 1, (2, 2), 0.1)
    figure = draw_affinities(["image", "network"], GREY, [(3, 0), (15, 12)], [block])
    *panels, bar = figure.axes
    assert bar.get_xlim() == (-4, 4)
    assert np.array_equal(panels[1].images[0].get_array(), signs_over(GREY, block.rows[0], 4.0))
    crosses = [[tuple(line.get_xydata()[0]) for line in axes.lines] for axes in panels]
    assert crosses == [[(3.5, 0.5)] * 2] * 2 + [[(15.5, 12.5)] * 2] * 2
    white, red, blue = (signs_over(torch.ones(3, 4, 4), torch.full((1, 1), v), 1.0)[0, 0] for v in (0.0, 1.0, -1.0))
    assert white.min() > 240
    assert red[0] > red[2] + 50
    assert blue[2] > blue[0] + 50


@pytest.mark.parametrize("size", [(32, 32), (224, 160), (12, 96)])
def test_no_text_overlaps_or_is_cut(size):
    pixels = torch.rand(3, *size)
    texts = itertools.cycle(HOSTILE)
    rows = [[Panel(tuple(next(texts) for _ in range(3)), pixels, torch.rand(4, 4)) for _ in range(2)] for _ in range(2)]
    blocks = [
        Affinities(100, torch.randn(2, 4, 4), 1, (4, 4), 0.123456),
        Affinities(7, torch.randn(2, 2, 2), 2, (4, 4), 0),
    ]
    for figure in (
        draw_maps(["W" * 80, "ground truth: " + "M" * 90], pixels, rows),
        draw_affinities(["W" * 80, "M" * 90], pixels, [(0, 0), (size[1] - 1, size[0] - 1)], blocks),
    ):
        renderer = figure.canvas.get_renderer()
        figure.draw(renderer)
        shown = [text for text in figure.findobj(matplotlib.text.Text) if text.get_visible() and text.get_text()]
        boxes = [text.get_window_extent(renderer) for text in shown]
        boxes += [axes.get_window_extent(renderer) for axes in figure.axes]
        for box in boxes:
            assert min(box.x0, box.y0) >= 0
            assert box.x1 <= figure.bbox.x1 + 1
            assert box.y1 <= figure.bbox.y1 + 1
        for one, other in itertools.combinations(boxes, 2):
            width = min(one.x1, other.x1) - max(one.x0, other.x0)
            height = min(one.y1, other.y1) - max(one.y0, other.y0)
            assert min(width, height) < 2, (one, other)


def test_lightnl_itself_is_left_alone():
    """Looking changes nothing: the outputs before and after are the same bits."""
    image = torch.randn(1, 3, 32, 32)
    model = with_life(create_model("digits"), image)
    with torch.no_grad():
        before = model(image)
        affinities(model, image, [(0, 0)])
        assert torch.equal(model(image), before)
    assert any(isinstance(module, LightNL) for module in model.modules())
