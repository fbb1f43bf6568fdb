"""Deploy form and exported files: the same outputs, proven in the runtime, and nothing left of what failed."""

import errno
import importlib.util
import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import autonl
from autonl.arch.codec import write_arch
from autonl.arch.spec import ArchSpec, BlockSpec, LightNLSpec
from autonl.errors import AutoNLError
from autonl.export import run as export_run
from autonl.export.companions import numbered_classes
from autonl.export.deploy import LAYOUTS, DeployedLightNL, deploy
from autonl.export.formats import FORMATS, open_format
from autonl.export.judge import Verdict, judge, made_images, parts_of, scales, up_to
from autonl.export.run import ExportError, Request, export
from autonl.nn.light_nonlocal import LightNL
from autonl.weights import read_weights
from tests.conftest import prove

# both orders of association with stride 1 and 2, SE, a skip, a block without expansion, odd maps at 60 x 52
SMALL = ArchSpec(
    name="small",
    blocks=(
        BlockSpec(3, 1, 1, 16, lightnl=LightNLSpec(0.25, 2)),
        BlockSpec(5, 2, 3, 24, se=0.5, lightnl=LightNLSpec(0.25, 1)),
        BlockSpec(3, 1, 3, 24, lightnl=LightNLSpec(0.125, 2)),
        BlockSpec(3, 2, 6, 96, lightnl=LightNLSpec(0.25, 1)),
        BlockSpec(3, 2, 6, 160, lightnl=LightNLSpec(0.25, 2)),
    ),
    resolution=(64, 64),
    classes=7,
    stem_chs=8,
    head_chs=64,
    activation="swish",
)

TINY = replace(SMALL, name="tiny", blocks=(SMALL.blocks[1],), resolution=(32, 32))


def installed(name):
    form = importlib.import_module(f"autonl.export.to_{name}").FORMAT
    missing = [package for package in form.packages if not importlib.util.find_spec(package)]
    return pytest.param(name, marks=pytest.mark.skipif(bool(missing), reason=f"{name} needs {', '.join(missing)}"))


def awake(model, size=64):
    """Weights that are not those at birth: BN with gammas, betas and statistics of its own, LightNL that works."""
    generator = torch.Generator().manual_seed(0)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.weight.data.uniform_(0.7, 1.3, generator=generator)
            module.bias.data.uniform_(-0.2, 0.2, generator=generator)
            module.momentum = None
    with torch.no_grad():
        model.train()(torch.randn(4, 3, size, size, generator=generator))
    for module in model.modules():
        if isinstance(module, LightNL):  # with statistics of one batch the cube of x runs away on the next
            module.bn.reset_running_stats()
            module.bn.weight.data *= 0.1
    return model.eval()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", [64, (60, 52), (33, 96)])
@pytest.mark.parametrize("operator", ["lightnl", "lightnl_energy"])
def test_deploy_form_gives_the_same_outputs(size, layout, operator):
    model = awake(autonl.create_model(replace(SMALL, operator=operator)))
    deployed = deploy(model, size, layout)
    height, width = (size, size) if isinstance(size, int) else size
    x = torch.randn(3, 3, height, width, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = model.double()(x.double())
        assert (deployed(x) - expected).abs().max() <= 2e-6 * expected.abs().max()  # 7e-7 at most over 40 seeds
    blocks = [module for module in deployed.modules() if isinstance(module, DeployedLightNL)]
    assert {block.order for block in blocks} == {"channel", "spatial"}  # both are tested here
    assert {block.mask is None for block in blocks} == ({True} if layout == "channels_first" else {True, False})
    left = {type(m) for m in deployed.modules()}
    assert not {LightNL, nn.BatchNorm2d} & left
    assert not any(issubclass(kind, nn.BatchNorm2d) for kind in left)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("stride", [1, 2])
def test_deploy_form_of_dark_maps(stride, layout):
    """An energy that is no larger than the epsilon beside it: both must be scaled alike."""
    block = LightNL(8, 0.25, stride, energy=True).eval()
    nn.init.ones_(block.bn.weight)
    x = 1e-4 * torch.randn(2, 8, 12, 10, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = block(x) - x
        branch = DeployedLightNL(block, (12, 10), layout)(x) - x
    assert expected.abs().max() > 1e-7  # there is something to compare
    assert torch.allclose(branch, expected, rtol=1e-3, atol=1e-10)


@pytest.mark.parametrize("name", prove(["autonl_s"], ["autonl_s", "autonl_l", "mobilenetv2_lightnl_100"]))
def test_deploy_form_of_the_zoo(name):
    model = awake(autonl.create_model(name), 224)
    x = torch.randn(1, 3, 224, 224, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = model(x)
        for form in (*({"layout": layout} for layout in LAYOUTS), {"custom_op": True}):
            assert (deploy(model, 224, **form)(x) - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_deploy_leaves_the_network_alone_and_keeps_what_it_does_not_know():
    model = awake(autonl.create_model("timm:resnet18", num_classes=3))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    x = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        assert torch.allclose(deploy(model, 64)(x), model(x), rtol=1e-5, atol=1e-6)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    network = autonl.create_model(SMALL)
    deploy(network, 64)
    assert network.training
    assert all(m.order is None for m in network.modules() if isinstance(m, LightNL))


@pytest.mark.parametrize(("arguments", "field"), [((0,), "size"), (("64",), "size"), ((64, "nchw"), "layout")])
def test_deploy_refuses(arguments, field):
    with pytest.raises(AutoNLError, match=f"^{field}: "):
        deploy(autonl.create_model(SMALL), *arguments)


# -- files --


def written(spec, folder):
    """(arch.yaml, a file of weights)"""
    write_arch(spec, folder / "arch.yaml")
    torch.save(awake(autonl.create_model(spec)).state_dict(), folder / "weights.pth")
    return folder / "arch.yaml", str(folder / "weights.pth")


@pytest.fixture
def small(tmp_path):
    return written(SMALL, tmp_path)


@pytest.fixture
def tiny(tmp_path):
    return written(TINY, tmp_path)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", [installed(name) for name in FORMATS])
def test_an_exported_file_is_the_network(small, tmp_path, name, dynamic):
    arch, weights = small
    form = open_format(name)
    out = tmp_path / "out" / f"small{form.suffix}"
    request = Request(name, out, (60, 52), dynamic, count=10, weights=weights)
    if dynamic and name in ("coreml", "litert"):
        with pytest.raises(AutoNLError, match="--dynamic-batch: not for"):
            export(arch, request)
        assert not out.parent.exists()
        return
    exported = export(arch, request)
    assert out.exists()
    if form.start:
        verdict = exported.judged.verdict
        assert verdict.images == 10
        assert verdict.difference <= 1e-4
        assert verdict.agreement == 1
    else:
        assert "conv" in exported.judged.checked
    about = json.loads((out.parent / f"{out.name}.json").read_text())
    assert (about["size"], about["labels"]) == ([60, 52], list("0123456"))
    assert (out.parent / f"{out.name}.labels.txt").read_text().split() == list("0123456")
    assert not [part for part in out.parent.iterdir() if part.name.startswith(".")]


@pytest.mark.parametrize("name", [installed("onnx")])
@pytest.mark.parametrize("taken", ["small.onnx", "small_onnx.py", "small.onnx.json"])
def test_a_folder_of_that_name_is_left_alone(tiny, tmp_path, name, taken):
    arch, weights = tiny
    (tmp_path / taken).mkdir()
    (tmp_path / taken / "thesis.txt").write_text("years of work")
    before = sorted(tmp_path.iterdir())
    with pytest.raises(AutoNLError, match=f"{taken}: there is a folder of that name"):
        export(arch, Request(name, tmp_path / "small.onnx", count=1, weights=weights))
    assert sorted(tmp_path.iterdir()) == before
    assert (tmp_path / taken / "thesis.txt").read_text() == "years of work"


def test_a_package_of_before_is_replaced(tmp_path):
    package, part = tmp_path / "net.mlpackage", tmp_path / "temporary" / "net.mlpackage"
    for folder, text in ((package, "before"), (part, "now")):
        folder.mkdir(parents=True)
        (folder / "Manifest.json").write_text(text)
    export_run.refuse_folder(package)
    export_run.put(part, package)
    assert (package / "Manifest.json").read_text() == "now"
    (package / "Manifest.json").unlink()  # somebody's own folder
    with pytest.raises(AutoNLError, match="there is a folder of that name"):
        export_run.refuse_folder(package)


@pytest.mark.parametrize("name", [installed("onnx")])
def test_a_network_for_another_system_is_judged_before_it_goes_there(tiny, tmp_path, monkeypatch, name):
    arch, weights = tiny
    elsewhere = replace(open_format(name), start=None, check=lambda path: "some operators")
    monkeypatch.setattr(export_run, "open_format", lambda form: elsewhere)
    request = Request(name, tmp_path / "out" / "small.onnx", count=1, weights=weights)
    assert export(arch, request).judged == export_run.Judged(request.out.stat().st_size, checked="some operators")
    with pytest.raises(AutoNLError, match="no such folder"):
        export(arch, replace(request, images=str(tmp_path / "nowhere")))
    broken = {
        key: tensor * torch.nan if tensor.is_floating_point() else tensor
        for key, tensor in read_weights(weights).items()
    }
    save_file(broken, tmp_path / "broken.safetensors")
    with pytest.raises(AutoNLError, match="not finite on 1 of 1 images"):
        export(arch, replace(request, weights=str(tmp_path / "broken.safetensors")))


def test_a_wrong_file_is_not_kept(tiny, tmp_path, monkeypatch):
    arch, weights = tiny
    pytest.importorskip("onnxruntime")
    honest = export_run.deploy

    def broken(*arguments):
        deployed = honest(*arguments)
        deployed.classifier.weight.data *= 1.001
        return deployed

    monkeypatch.setattr(export_run, "deploy", broken)
    (tmp_path / "out").mkdir()
    with pytest.raises(ExportError, match=r"small.onnx: not kept: its logits differ"):
        export(arch, Request("onnx", tmp_path / "out" / "small.onnx", count=2, weights=weights))
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize(
    ("problem", "kind", "told"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), AutoNLError, "small.onnx: cannot be written: No space left"),
        (OSError("no such operator"), ExportError, "small.onnx: not kept: onnx cannot hold this network: OSError"),
    ],
)
def test_a_full_disk_is_not_the_networks_fault(problem, kind, told, tmp_path):
    with pytest.raises(kind, match=told), export_run.failing(tmp_path / "small.onnx", "onnx cannot hold this network"):
        raise problem


def test_verdicts():
    """By hand: two images, two classes."""
    model = nn.Flatten()
    batch = [(torch.tensor([[2.0, 1.0], [0.0, 4.0]]), torch.tensor([0, 0]))]

    def off(images):
        return images + np.array([[0.0, 0.004]], np.float32)

    verdict = judge(model, off, batch, 5, False)
    assert (verdict.images, verdict.agreement) == (2, 1.0)
    assert verdict.difference == pytest.approx(2e-3, rel=1e-3)  # of 2, the largest logit of the first image
    assert (verdict.score, verdict.file, verdict.network) == ("top-1", 50.0, 50.0)
    assert "2.0e-03 of the largest" in verdict.problem(quantized=False)
    assert verdict.problem(quantized=True) is None
    swapped = judge(model, lambda images: images[:, ::-1], batch, 1, False)
    assert (swapped.images, swapped.agreement) == (1, 0.0)
    assert swapped.problem(quantized=True) == "int8 names another class on 100.0% of 1 image"
    nowhere = judge(model, lambda images: images * np.nan, batch, 2, False)
    assert nowhere.problem(quantized=False) == nowhere.problem(quantized=True) == "its logits are not finite"
    nothing = judge(model, lambda images: images, [(torch.zeros(1, 2), torch.tensor([-1]))], 1, False)
    assert (nothing.difference, nothing.agreement, nothing.file) == (0, 1, None)
    with pytest.raises(AutoNLError, match="no images to judge the file by"):
        judge(model, off, [], 2, False)
    assert Verdict(3, 1e-5, 1.0).problem(quantized=False) is None
    lost = [(torch.tensor([[2.0, 1.0], [0.0, torch.nan]]), torch.tensor([0, 0]))]
    with pytest.raises(AutoNLError, match="own logits are not finite on 1 of 2 images; train it anew"):
        judge(model, off, lost, 2, False)
    maps = [(torch.full((1, 2, 4, 4), torch.inf), torch.tensor([0]))]
    cubed = nn.Sequential(LightNL(2), nn.AdaptiveAvgPool2d(1), nn.Flatten()).eval()
    with pytest.raises(AutoNLError, match=r"on 1 of 1 images: LightNL grows .* autonl train --nl lightnl_energy$"):
        judge(cubed, lambda images: images[:, :, 0, 0], maps, 1, False)


def test_an_image_that_explodes_hides_no_other():
    """LightNL as published has such."""
    batch = [(torch.tensor([[2.0, 1.0], [-1e30, 1e30]]), torch.tensor([0, 1]))]
    right = judge(nn.Identity(), lambda images: images * 1.00001, batch, 2, False)
    assert right.problem(quantized=False) is None
    swapped = judge(nn.Identity(), lambda images: images if images.max() > 9 else images[:, ::-1], batch, 2, False)
    assert (swapped.difference, swapped.agreement) == (0.5, 0.5)


def test_what_logits_are_measured_by():
    """By hand: of ten images nine stay below 9, of two the smaller counts; all zeros differ by what they differ."""
    assert scales(np.array([1.0, 2, 3, 4, 5, 6, 7, 8, 9, 1e30])).tolist() == [9.0] * 9 + [1e30]
    assert scales(np.array([1e30, 2.0])).tolist() == [1e30, 2]
    assert scales(np.zeros(3)).tolist() == [1, 1, 1]


def test_a_quiet_image_has_the_rounding_of_the_others():
    """By hand: 4e-5 beside logits of 4, 4 and 0.004."""
    batch = [(torch.tensor([[4.0, 1.0], [-4.0, 1.0], [0.004, 0.003]]), torch.tensor([0, 1, 0]))]
    verdict = judge(nn.Identity(), lambda images: images + np.float32(4e-5), batch, 3, False)
    assert verdict.difference == pytest.approx(1e-5, rel=0.01)
    assert verdict.problem(quantized=False) is None


def test_verdicts_on_pixels():
    """By hand: one image of 1 x 4 pixels, two classes; 0, 0, 1 and void are true.

    The file says 0, 0, 0, 1: IoU 2 / 3 and 0. The network says 1, 0, 1, 1: IoU 1 / 2 and 1 / 2.
    """
    logits = torch.tensor([[[[0.0, 5, 1, 1]], [[1.0, 0, 3, 4]]]])  # (1, 2, 1, 4)
    batch = [(logits, torch.tensor([[[0, 0, 1, 255]]], dtype=torch.uint8))]

    def file(images):
        return images + np.array([[[[2.0, 0, 3, 0]], [[0.0, 0, 0, 0]]]], np.float32)

    verdict = judge(nn.Identity(), file, batch, 1, False)
    assert (verdict.score, verdict.agreement, verdict.counted) == ("mIoU", 0.5, "the pixels of 1 image")
    assert verdict.file == pytest.approx(100 * (2 / 3 + 0) / 2)
    assert verdict.network == pytest.approx(100 * (1 / 2 + 1 / 2) / 2)
    void = [(logits, torch.full((1, 1, 4), 255, dtype=torch.uint8))]
    unmasked = [(logits, torch.tensor([-1]))]
    assert [judge(nn.Identity(), file, one, 1, False).file for one in (void, unmasked)] == [None, None]


def test_images_to_judge_by():
    images = next(made_images((20, 24)))[0]
    assert images.shape == (10, 3, 20, 24)
    assert not torch.equal(images[0], images[1])
    assert [len(part) for part in parts_of(np.zeros((9, 1)), (1, 2, 3))] == [1, 2, 3, 1, 2]
    assert sum(len(images) for images, _ in up_to(made_images((4, 4)), 23)) == 23


def test_a_format_that_is_not_installed_says_how_to_install_it(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(AutoNLError, match=r"needs openvino, .* pip install openvino$"):
        open_format("openvino")
    with pytest.raises(AutoNLError, match=r"python3 -m venv .*torch<2.15"):
        open_format("litert")


def test_labels_where_no_run_tells_them():
    assert numbered_classes(3) == ["0", "1", "2"]
    names = numbered_classes(1000)
    assert names[0].startswith("tench")
