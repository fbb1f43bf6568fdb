"""What LightNL costs in a runtime: a network with it beside the same one without, on one thread, in turns.

    python -m benchmarks.price [onnxruntime openvino executorch] [--calls 6] [--rounds 30] [--res 224]

Calls of `autonl profile --latency`, each a process of its own, because a network that is loaded anew is up to 2 %
faster or slower; by the runtimes' own operators and, where a runtime takes it, by `--custom-op`, in turns. A row a call
goes to benchmarks/results/latency_price.csv.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

from autonl.export.formats import RUNTIMES, WITH_CUSTOM_OP
from benchmarks import RESULTS, add_rows
from benchmarks.latency import processor

WITHOUT, WITH = "mobilenetv2_100", "mobilenetv2_lightnl_100"
COLUMNS = ("runtime", "version", "custom_op", "call", "res", "without_ms", "with_ms", "price", "runs", "processor")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runtimes", nargs="*", default=list(RUNTIMES), metavar="runtime")
    parser.add_argument("--calls", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=30, help="three runs of each network in every one")
    parser.add_argument("--res", type=int, default=224)
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    if unknown := set(arguments.runtimes) - set(RUNTIMES):
        parser.error(f"{', '.join(sorted(unknown))}: unknown; allowed: {', '.join(RUNTIMES)}")
    kinds = [(runtime, False) for runtime in arguments.runtimes]
    kinds += [(runtime, True) for runtime in arguments.runtimes if RUNTIMES[runtime] in WITH_CUSTOM_OP]
    prices: dict[tuple[str, bool], list[float]] = {kind: [] for kind in kinds}
    for call in range(arguments.calls):
        for runtime, custom_op in kinds:
            row = measure(runtime, custom_op, arguments.rounds, arguments.res) | {"call": call}
            add_rows(arguments.out / "latency_price.csv", COLUMNS, [row])
            prices[runtime, custom_op].append(row["price"])
            print(runtime, "--custom-op" if custom_op else "", row["price"], flush=True)
    for (runtime, custom_op), found in prices.items():
        how = f"{runtime}{' --custom-op' if custom_op else ''}"
        print(f"{how}: {median(found):.3f} ({min(found):.3f} to {max(found):.3f}, {len(found)})")


def measure(runtime: str, custom_op: bool, rounds: int, res: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "autonl", "profile", WITHOUT, WITH, "--latency", "--json"]
    command += ["--runtime", runtime, "--rounds", str(rounds), "--res", str(res), *["--custom-op"] * custom_op]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        sys.exit(done.returncode)
    without, with_it = json.loads(done.stdout)["networks"]
    return {
        "runtime": runtime, "version": version(runtime), "custom_op": custom_op, "res": res,
        "without_ms": round(without["median"], 4), "with_ms": round(with_it["median"], 4),
        "price": round(with_it["median"] / without["median"], 4),
        "runs": without["runs"], "processor": processor(),
    }  # fmt: skip


if __name__ == "__main__":
    main()
