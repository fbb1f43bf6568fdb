"""The report in a real headless Chromium, at the width of a screen and of a phone. Needs Debian's chromium and
playwright: `make browser`."""

import json
import os
import shutil
from pathlib import Path

import pytest

from autonl.report.images import Judged, Mistake, data_uri
from autonl.report.page import render, section
from autonl.report.runs import read_run
from tests.test_report import HOSTILE, write_run

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
WIDTHS = (1280, 390)


@pytest.fixture(scope="module")
def chromium():
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright: run `make browser`")
    if CHROMIUM is None:
        pytest.skip("needs Chromium: run `make browser`, or install the package chromium")
    with playwright.sync_playwright() as driver:
        # Chromium's sandbox refuses root, who runs the tests in a container
        sandbox = [] if os.geteuid() else ["--no-sandbox"]
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=sandbox)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """A search and two trainings, names hostile, one with mistakes: everything that the page can show."""
    from PIL import Image

    root = tmp_path_factory.mktemp("report")
    found = write_run(root / "found", search=True)
    trained = write_run(root / "<img src=x onerror=alert(1)> & a very long name\u202e" / ("x" * 200), classes=HOSTILE)
    other = write_run(root / "other", top1=95.0, optim={"lr": 0.5})
    picture, red = (data_uri(Image.new("RGB", (8, 8), colour), "PNG") for colour in ("grey", "red"))
    mistakes = [Mistake(name, 0, 1, 99.0, picture, {"predicted": red, "true": red}) for name in HOSTILE]
    judged = Judged(10, 50.0, [[5, 5, 0, 0, 0], *([0] * 5 for _ in range(4))], mistakes, size=(8, 8))
    sections = [section(read_run(found)), section(read_run(trained), judged), section(read_run(other))]
    path = root / "report.html"
    path.write_text(render(sections))
    return path


@pytest.fixture(params=WIDTHS, ids=lambda width: f"{width}px", scope="module")
def page(request, chromium, report):
    """The report, opened once for all tests; at the end nothing has gone wrong in it and nothing was fetched."""
    context = chromium.new_context(viewport={"width": request.param, "height": 900}, has_touch=request.param < 600)
    opened = context.new_page()
    problems, fetched = [], []
    opened.on("console", lambda message: problems.append(message.text))
    opened.on("pageerror", lambda error: problems.append(str(error)))
    opened.on("dialog", lambda dialog: problems.append("a dialog") or dialog.dismiss())
    opened.on("request", lambda request: fetched.append(request.url))
    opened.goto(report.as_uri())
    yield opened
    context.close()
    assert problems == []
    assert [url for url in fetched if not url.startswith("data:")] == [report.as_uri()]


def test_the_drawing_shows_every_block_and_pointing_shows_its_data(page):
    drawing = page.locator("#run-1 .drawing")
    blocks = drawing.locator(".block")
    assert blocks.count() == 7  # stem, 3 blocks, the one left out, head, classifier
    assert all(blocks.nth(n).is_visible() for n in range(7))
    where = "e => [e.offsetTop, e.offsetHeight]"
    before = drawing.evaluate(where)
    blocks.nth(2).hover()
    told = drawing.locator(".details").inner_text()
    for expected in (
        "block 1",
        "8 to 16",
        "8 x 8",
        "5, stride 2",
        "0.25 of the channels, stride 1",
        "always open",
        "+0.50",
    ):
        assert expected in told
    assert drawing.evaluate(where) == before  # nothing moved
    blocks.nth(3).hover()
    assert "left out" in drawing.locator(".details").inner_text()


def test_blocks_are_reached_by_keyboard(page):
    drawing = page.locator("#run-1 .drawing")
    drawing.locator(".choices button").last.focus()
    page.keyboard.press("Tab")
    assert drawing.locator(".details h4").inner_text() == "stem"
    page.keyboard.press("Tab")
    assert drawing.locator(".details h4").inner_text() == "block 0"


def test_toggles_work(page):
    drawing = page.locator("#run-1 .drawing")
    shape = drawing.locator(".block .shape").nth(5)  # the head: no expansion, but MACs
    page.emulate_media(reduced_motion="reduce")
    small = shape.bounding_box()["height"]
    drawing.get_by_role("button", name="MACs", exact=True).click()
    assert shape.bounding_box()["height"] > small + 5
    assert drawing.get_by_role("button", name="expansion", exact=True).get_attribute("aria-pressed") == "false"

    chart = page.locator("#run-1 .chart").filter(has_text="loss")
    line = chart.locator("polyline").first
    assert line.is_visible()
    chart.get_by_role("button", name="training").click()
    assert not line.is_visible()
    chart.get_by_role("button", name="training").click()
    assert line.is_visible()

    shown = page.locator(".mistake .map.true").first
    assert shown.evaluate("e => getComputedStyle(e).opacity") == "0"
    page.get_by_role("button", name="of the true class").click()
    assert shown.evaluate("e => getComputedStyle(e).opacity") == "0.65"


def test_charts_are_read_out_by_pointer_and_keys(page):
    chart = page.locator("#run-3 .chart").filter(has_text="accuracy")
    plot, readout = chart.locator(".plot"), chart.locator(".readout")
    plot.scroll_into_view_if_needed()
    box = plot.bounding_box()
    page.mouse.move(box["x"] + 0.9 * box["width"], box["y"] + 0.5 * box["height"])
    assert readout.inner_text() == "epoch 2: top-1 95 %"
    plot.focus()
    page.keyboard.press("ArrowRight")
    assert readout.inner_text() == "epoch 1: top-1 50 %"
    gates = page.locator("#run-1 .chart").filter(has_text="LightNL and its channels")
    gates.locator(".plot").focus()
    page.keyboard.press("ArrowRight")
    assert gates.locator(".readout").inner_text().startswith("block 1, LightNL on 0.25 of the channels, epoch 2: 0.25")
    runs = page.locator("#compared .spots")
    runs.locator(".plot").focus()
    page.keyboard.press("ArrowLeft")
    assert "95.00 % at" in runs.locator(".readout").inner_text()
    matrix = page.locator(".spots").filter(has_text="Confusion matrix")
    matrix.locator("rect.wrong").first.hover()
    assert f"{HOSTILE[0]} taken for {HOSTILE[1]}: 5 of 10, 50.0 %" in matrix.locator(".readout").inner_text()


def test_the_page_fits_and_keeps_still(page):
    width = page.viewport_size["width"]
    assert page.evaluate("document.documentElement.scrollWidth") == width
    shift = page.evaluate(
        "new Promise(done => {let sum = 0; new PerformanceObserver(list => {"
        "for (const e of list.getEntries()) if (!e.hadRecentInput) sum += e.value})"
        ".observe({type: 'layout-shift', buffered: true});"
        "setTimeout(() => done(sum), 100)})"
    )
    assert shift == 0
    smallest = page.evaluate(
        "Math.min(...[...document.querySelectorAll('button')].map(b => b.getBoundingClientRect().height))"
    )
    assert smallest >= 28  # for a finger


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_can_be_read_in_both_schemes(page, scheme):
    page.emulate_media(color_scheme=scheme)
    button = page.locator("#theme")
    while button.inner_text() != "colours: system":
        button.click()
    assert contrasts(page) >= 4.5
    other = {"light": "dark", "dark": "light"}[scheme]
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    while button.inner_text() != f"colours: {other}":
        button.click()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != background
    assert contrasts(page) >= 4.5


def contrasts(page):
    """The smallest contrast (WCAG) of a text with the first opaque background behind it."""
    return page.evaluate(
        """() => {
        const rgb = c => c.match(/[\\d.]+/g).map(Number);
        const linear = v => v <= 10.0164 ? v / 3294.6 : ((v / 255 + 0.055) / 1.055) ** 2.4;
        const light = c => 0.2126 * linear(c[0]) + 0.7152 * linear(c[1]) + 0.0722 * linear(c[2]);
        let least = 21;
        for (const e of document.querySelectorAll("body *")) {
          if (![...e.childNodes].some(n => n.nodeType === 3 && n.data.trim()) || !e.getClientRects().length) continue;
          if (["SCRIPT", "STYLE"].includes(e.tagName)) continue;
          const style = getComputedStyle(e);
          let behind = e;
          while (behind && (rgb(getComputedStyle(behind).backgroundColor)[3] ?? 1) === 0) behind = behind.parentElement;
          const back = behind ? rgb(getComputedStyle(behind).backgroundColor).slice(0, 3) : [255, 255, 255];
          const front = rgb(e instanceof SVGElement ? style.fill : style.color).slice(0, 3);
          const [a, b] = [light(front), light(back)].sort((x, y) => y - x);
          least = Math.min(least, (a + 0.05) / (b + 0.05));
        }
        return least; }"""
    )


def test_hostile_names_are_text_in_the_browser(page):
    assert page.locator("img[src='x']").count() == 0
    heading = page.locator("#run-2 h2").inner_text()
    assert "<img src=x onerror=alert(1)>" in heading
    assert "[U+202E]" in heading
    assert page.locator("#run-2").get_by_text("<script>alert(1)</script>").first.is_visible()


def test_a_report_of_a_damaged_folder_opens(chromium, tmp_path):
    folder = write_run(tmp_path / "run")
    (folder / "metrics.csv").write_text("epoch,top1\n1,50\n")
    (folder / "arch.yaml").unlink()
    path = tmp_path / "report.html"
    path.write_text(render([section(read_run(folder))]))
    opened = chromium.new_page()
    problems = []
    opened.on("pageerror", lambda error: problems.append(str(error)))
    opened.goto(Path(path).as_uri())
    assert opened.locator(".notes li").all_inner_texts() == ["arch.yaml: missing; the network cannot be drawn"]
    assert opened.locator(".chart circle:not(.spot)").count() == 1  # one epoch is a point
    opened.close()
    assert json.dumps(problems) == "[]"
