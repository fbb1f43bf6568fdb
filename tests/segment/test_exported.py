"""A segmentation leaves: the file gives the masks of the network, and so does the script beside it."""

import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from autonl.data.loaders import view_of
from autonl.data.masks import FitInto, fill_of
from autonl.export.deploy import LAYOUTS, deploy
from autonl.export.formats import FORMATS, open_format
from autonl.export.run import Request, export
from autonl.segment.network import Segmenter, create_backbone, load_segmenter, segment_config
from autonl.segment.pictures import palette, predicted
from tests.segment.small import CLASSES, draw, segment_small, write_pairs, write_set
from tests.test_export import SMALL, awake, installed


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("exported")
    drawn = write_set(folder / "set")
    segment_small(drawn, folder / "run", schedule={"epochs": 4})
    return folder / "run", drawn


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("stride", [16, 32])
def test_deploy_form_gives_the_same_masks(layout, stride):
    model = awake(Segmenter(create_backbone(SMALL, stride, {}), 3))
    deployed = deploy(model, (64, 96), layout)
    x = torch.randn(2, 3, 64, 96, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = model(x)
        assert (deployed(x) - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert not [module for module in deployed.modules() if isinstance(module, nn.BatchNorm2d)]


@pytest.mark.parametrize("name", [installed(name) for name in FORMATS])
def test_an_exported_file_is_the_segmentation(run, name, tmp_path):
    folder, drawn = run
    form = open_format(name)
    out = tmp_path / f"boxes{form.suffix}"
    verdict = export(folder, Request(name, out, images=str(drawn))).judged.verdict
    about = json.loads((tmp_path / f"{out.name}.json").read_text())
    assert (about["labels"], len(about["palette"])) == (list(CLASSES), 3 * 256)
    if form.start:
        assert (verdict.images, verdict.agreement, verdict.score) == (5, 1, "mIoU")
        assert verdict.difference <= 1e-4
        trained = json.loads((folder / "result.json").read_text())
        assert verdict.network == pytest.approx(trained["miou"], abs=1e-6)
        assert verdict.file == pytest.approx(trained["miou"], abs=0.1)  # a pixel may lie between two classes


@pytest.mark.parametrize("name", [installed("onnx"), installed("openvino")])
def test_int8_of_a_segmentation(run, name, tmp_path):
    folder, drawn = run
    sizes = []
    for quantize in (False, True):
        out = tmp_path / f"{quantize}{open_format(name).suffix}"
        calibrate = str(drawn) if quantize else None
        judged = export(folder, Request(name, out, quantize=quantize, calibrate=calibrate, images=str(drawn))).judged
        assert judged.verdict.agreement >= 0.97
        sizes.append(judged.bytes)
    assert sizes[1] < 0.5 * sizes[0]


@pytest.mark.parametrize("name", [installed("onnx")])
def test_other_sizes_batches_and_sets(run, name, tmp_path):
    """Masks of other classes tell nothing; the held-out share and the class list are those of the run."""
    folder, _ = run
    made = export(folder, Request(name, tmp_path / "any.onnx", (40, 52), True, count=7)).judged.verdict
    assert (made.file, made.counted, made.agreement) == (None, "the pixels of 7 images", 1)
    pairs = write_pairs(tmp_path / "more", 8)
    (pairs / "classes.txt").write_text("a\nb\nc\nd\n")
    other = export(folder, Request(name, tmp_path / "other.onnx", images=str(pairs))).judged.verdict
    assert (other.file, other.images) == (None, 1)
    (pairs / "classes.txt").rename(tmp_path / "names.txt")
    data = {"classes": str(tmp_path / "names.txt"), "held_out": 0.5}
    segment_small(pairs, tmp_path / "run", data=data)
    own = export(tmp_path / "run", Request(name, tmp_path / "own.onnx", images=str(pairs))).judged.verdict
    assert own.images == 4
    assert own.network == pytest.approx(json.loads((tmp_path / "run" / "result.json").read_text())["miou"], abs=1e-6)


@pytest.mark.parametrize(("height", "width", "alike"), [(20, 28, 0.999), (61, 97, 0.97)])
def test_the_script_draws_what_the_network_sees(run, height, width, alike, tmp_path):
    """In a process that knows nothing of autonl. A picture that is too large is reduced, by PIL there."""
    folder, _ = run
    export(folder, Request("onnx", tmp_path / "boxes.onnx", count=1))
    image, mask = draw(7, height, width)
    Image.fromarray(image).save(tmp_path / "picture.png")
    command = [sys.executable, tmp_path / "boxes_onnx.py", tmp_path / "picture.png"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd="/")
    *shares, name = done.stdout.splitlines()
    segmenter = load_segmenter(folder)
    view = view_of(segmenter.backbone, segment_config(folder).data)
    from torchvision import tv_tensors
    from torchvision.transforms.v2.functional import to_image

    seen, _, extent = FitInto(view.size, fill_of(view))(to_image(image), tv_tensors.Mask(mask[None]))
    expected = predicted(segmenter, seen.as_subclass(torch.Tensor), view).numpy()[: extent[0], : extent[1]]
    with Image.open(tmp_path / name) as drawn:
        found = np.asarray(drawn.resize(extent[::-1], Image.Resampling.NEAREST))
        assert (name, drawn.size, drawn.mode) == (str(tmp_path / "picture_classes.png"), (width, height), "P")
        assert drawn.getpalette() == palette().flatten().tolist()
    assert (found == expected).mean() >= alike
    told = {line.split()[1]: float(line.split("%")[0]) for line in shares}
    for number, label in enumerate(CLASSES):
        assert told.get(label, 0) == pytest.approx(100 * (expected == number).mean(), abs=100 * (1 - alike))
    assert "autonl" not in (tmp_path / "boxes_onnx.py").read_text()
