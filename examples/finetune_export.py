"""Fine-tune a trained network on your own folder of images and export it to ONNX.

    python examples/finetune_export.py flowers --network runs/trained --out flowers.onnx
    python examples/finetune_export.py flowers --network timm:mobilenetv2_100 --weights model.safetensors

The folder holds a folder of images for every class; they need not be the classes that the network was trained on. The
same as `autonl train --inherit` (or `--weights`) and `autonl export`, from Python.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from autonl import AutoNLError
from autonl.cli.progress import TrainingBar
from autonl.export.run import Request, export
from autonl.train.config import load_config, replace
from autonl.train.run import train_classifier


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", help="a folder of class folders")
    parser.add_argument("--network", required=True, help="a run folder; or a zoo name or timm:NAME, with --weights")
    parser.add_argument("--weights", help="a safetensors or state_dict file; default: those of the run folder")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=16, help="at most the number of training images")
    parser.add_argument("--lr", type=float, default=0.01, help="low: the network is to keep what it knows")
    parser.add_argument("--run", type=Path, default=Path("runs/tuned"), help="where the training goes")
    parser.add_argument("--out", type=Path, default=Path("tuned.onnx"))
    parser.add_argument("--resume", action="store_true", help="go on with the training in --run")
    given = parser.parse_args(arguments)
    if given.out.suffix != ".onnx":
        parser.error(f"--out {given.out}: must end in .onnx")

    settings = [
        f"schedule.epochs={given.epochs}",
        f"schedule.warmup_epochs={min(1, given.epochs - 1)}",  # the new classifier calms down before the rest moves
        f"data.batch_size={given.batch_size}",
        f"optim.lr={given.lr}",
        "loop.clip_norm=1.0",
        "augment.scale=[0.5,1]",  # crops that still show what the image is of
    ]
    config = replace(load_config(None, settings), data={"path": given.data})
    inherit = given.weights is None
    try:
        result = train_classifier(
            given.network,
            config,
            given.run,
            resume=given.resume,
            weights=given.weights,
            inherit=inherit,
            progress=TrainingBar,
        )
    except AutoNLError as error:
        raise SystemExit(f"error: {error}") from None
    if result.stopped_by:
        raise SystemExit(f"stopped and saved in {given.run}; go on with the same command and --resume")
    print(f"top-1 {result.metrics['top1']:.1f} % of {result.metrics['val_images']:.0f} validation images")

    # the file is run in ONNX Runtime on your images, and kept only if it names the same classes as the network
    exported = export(given.run, Request("onnx", given.out, images=given.data))
    verdict = exported.judged.verdict
    assert verdict is not None  # None: a format that this machine cannot run
    print(f"{given.out}: {exported.judged.bytes / 1e6:.1f} MB, the same class on {verdict.agreement:.0%} of the images")
    script = next(file for file in exported.files if file.suffix == ".py")
    print(f"next: python {script} IMAGE")


if __name__ == "__main__":
    main()
