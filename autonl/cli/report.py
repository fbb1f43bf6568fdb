"""autonl report"""

from __future__ import annotations

import json as json_format
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.console import Console

from autonl.errors import AutoNLError, refuse

if TYPE_CHECKING:
    from autonl.report.images import Judged
    from autonl.report.runs import Run

LARGE = 5_000_000  # bytes


def report(
    runs: list[str] = typer.Argument(metavar="RUN...", help="Run folders of searches and trainings."),
    out: str = typer.Option("report.html", metavar="FILE", help="The file to write."),
    data: str | None = typer.Option(
        None, metavar="DIR", help="Images for confusions and mistakes. Default: the validation images of each run."
    ),
    images: bool = typer.Option(True, "--images/--no-images", help="Whether to look at images at all."),
    json: bool = typer.Option(False, "--json", help="One JSON object on standard output."),
) -> None:
    """One HTML file that shows runs: the network, gates, curves, confusions, mistakes, and how runs compare.

    Example: autonl report runs/found runs/trained --out report.html
    """
    from autonl.report.page import render, section
    from autonl.report.runs import read_run
    from autonl.train.state import write_atomically

    if Path(out).suffix not in (".html", ".htm"):
        refuse("--out", out, "a file that ends in .html")
    if data and not images:
        raise AutoNLError(f"--data {data}: --no-images looks at none; give one of the two")
    if not Path(out).parent.is_dir():
        raise AutoNLError(f"--out {out}: there is no folder {Path(out).parent}")
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    found = [read_run(Path(run)) for run in runs]
    sections = []
    for run in found:
        judged = look_at_images(run, data, console) if images and run.kind == "training" else None
        sections.append(section(run, judged))
    page = render(sections).encode("utf-8", "backslashreplace")
    write_atomically(Path(out), page)
    if len(page) > LARGE:
        console.print(f"{out}: larger than 5 MB; report on fewer runs, or with --no-images", markup=False)
    if json:
        rows = [{"run": run.name, "notes": run.notes, **run.result} for run in found]
        typer.echo(json_format.dumps({"report": out, "bytes": len(page), "runs": rows}))
        return
    for run in found:
        for note in run.notes:
            console.print(f"{run.name}: {note}", markup=False)
    noun = "run" if len(found) == 1 else "runs"
    print(f"{out}: {len(found)} {noun}, {len(page) / 1000:,.0f} kB")
    print(f"\nnext: open {out} in a browser")


def look_at_images(run: Run, data: str | None, console: Console) -> Judged | None:
    """None and a note where there are no images or weights; images that were asked for must be there."""
    from autonl.report.images import judge

    try:
        return judge(run.folder, data, lambda told: console.print(told, markup=False))
    except AutoNLError as error:
        if data:
            raise
        run.note(f"confusions and mistakes: {error}")
        return None
