"""A newcomer's first minutes, in a real browser: open the lab, run the first notebook, move a slider, press Run."""

import os
import pathlib
import shutil
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Locator, Page, sync_playwright

from tests.browser.lab import WAIT_S, Lab, running_lab, wait_for

CHROMIUM_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-quic",
    "--no-first-run",
)
# Where a picture of the cockpit is written, for the README; nowhere unless asked for.
PICTURE = os.environ.get("LABKIT_COCKPIT_PICTURE")

# What plotly drew in the cockpit: title and values of the figure whose title begins with some words.
READ_FIGURE = """
words => {
  const slider = document.querySelector('.widget-hslider');
  const figures = slider ? [...slider.closest('.jp-Cell').querySelectorAll('.js-plotly-plot')] : [];
  const figure = figures.find(
    one => one._fullData && one.layout.title && one.layout.title.text.startsWith('<b>' + words));
  if (!figure) return null;
  const values = one => ({name: one.name, x: Array.from(one.x || []), y: Array.from(one.y || [])});
  return {title: figure.layout.title.text, traces: figure._fullData.map(values)};
}
"""

# Whether every figure of the cockpit is as wide as its place.
FIGURES_FIT = """
() => {
  const cell = document.querySelector('.widget-hslider').closest('.jp-Cell');
  const figures = [...cell.querySelectorAll('.js-plotly-plot')];
  return figures.length === 3 && figures.every(one => Math.abs(one._fullLayout.width - one.clientWidth) <= 2);
}
"""

pytestmark = [pytest.mark.browser, pytest.mark.ranks, pytest.mark.slow, pytest.mark.timeout(1500)]


@pytest.fixture
def lab(repository: pathlib.Path, tmp_path: pathlib.Path) -> Iterator[Lab]:
    with running_lab(repository, tmp_path) as started:
        yield started


@pytest.fixture
def page(tmp_path: pathlib.Path) -> Iterator[Page]:
    """A page in a fresh browser; its console and last sight lie in the folder of the test, to look into a failure."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=list(CHROMIUM_FLAGS))
        opened = browser.new_page(viewport={"width": 1500, "height": 1250})
        opened.set_default_timeout(WAIT_S * 1000)
        console = tmp_path / "console.txt"
        opened.on("console", lambda message: append(console, f"{message.type}: {message.text}"))
        opened.on("pageerror", lambda error: append(console, f"page error: {error}"))
        yield opened
        opened.screenshot(path=tmp_path / "last.png")
        browser.close()


def test_the_first_notebook_and_its_sliders(lab: Lab, page: Page) -> None:
    page.goto(lab.address)
    page.locator(".jp-Notebook .jp-Cell").first.wait_for()
    kernel = wait_for(lab.idle_kernel, "an idle kernel")

    run_all(page)
    cells = wait_for(lambda: executed(lab, page), "every cell to be run and saved")
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))

    pipeline = slider(page, "pipeline")
    wait_for(lambda: changed(page, "Predicted", "dp2 pp2"), "the prediction of the first layout")
    wait_for(lambda: page.evaluate(FIGURES_FIT), "the figures to fit the page")
    pipeline.press("ArrowRight")
    predicted = wait_for(lambda: changed(page, "Predicted", "pp4"), "the prediction to follow the slider")
    assert lab.ask_kernel(kernel, "[cockpit.layout.dp, cockpit.layout.tp, cockpit.layout.pp]") == [1, 1, 4]
    assert lab.ask_kernel(kernel, "str(cockpit.layout)") in predicted["title"]

    sequence = row(page, "sequence").locator("input")
    sequence.press("Space")
    page.get_by_text("it splits the sequence within tp").wait_for()
    assert lab.ask_kernel(kernel, "str(cockpit.layout)") in predicted["title"]
    sequence.press("Tab")
    page.locator(".labkit-refusal button:focus").press("Enter")
    wait_for(lambda: changed(page, "Predicted", " sp"), "the prediction of the nearest layout")
    sequence.press("Space")
    slider(page, "pipeline").press("End")
    wait_for(lambda: changed(page, "Predicted", "pp4"), "the prediction of the pipeline")

    page.locator(".jupyter-button", has_text="Run").click()
    page.get_by_text("Done: 10 steps").wait_for()
    losses = wait_for(lambda: figure(page, "Loss · pp4"), "the losses")
    assert losses["traces"][0]["y"] == pytest.approx(lab.ask_kernel(kernel, "cockpit.run.losses"), rel=1e-12)
    measured = wait_for(lambda: changed(page, "Measured", "step 9"), "the measured step")
    assert "pp4" in measured["title"]
    assert "paced: durations as declared" in measured["title"]
    (forward,) = [trace for trace in measured["traces"] if trace["name"] == "forward"]
    durations = "[e.duration_s for e in cockpit.run.trace.of_step(9).events if e.kind == 'F']"
    expected = [seconds * 1e3 for seconds in lab.ask_kernel(kernel, durations)]
    assert sorted(forward["x"]) == pytest.approx(sorted(expected), rel=1e-9)
    take_picture(page)


def append(path: pathlib.Path, line: str) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(f"{line}\n")


def run_all(page: Page) -> None:
    page.get_by_role("menuitem", name="Run", exact=True).click()
    page.get_by_role("menuitem", name="Run All Cells", exact=True).click()


def executed(lab: Lab, page: Page) -> list[dict[str, Any]] | None:
    """The saved cells, once the kernel has run them all, without an error."""
    if lab.idle_kernel() is None:
        return None
    page.keyboard.press("Control+s")
    cells = lab.saved_cells()
    errors = [output for cell in cells for output in cell["outputs"] if output["output_type"] == "error"]
    assert errors == []
    return cells if cells and all(cell["execution_count"] for cell in cells) else None


def slider(page: Page, label: str) -> Locator:
    """The handle of a cockpit's slider, scrolled into view."""
    handle = row(page, label).locator(".noUi-handle")
    if not handle.count():
        page.locator(".jp-Notebook").press("Control+End")
    handle.scroll_into_view_if_needed()
    return handle


def row(page: Page, label: str) -> Locator:
    """The row of a cockpit with this label."""
    return page.locator(".labkit-row", has=page.get_by_text(label, exact=True))


def figure(page: Page, words: str) -> Any:
    return page.evaluate(READ_FIGURE, words)


def changed(page: Page, words: str, part: str) -> Any:
    """The figure, once its title has this part."""
    found = figure(page, words)
    return found if found and part in found["title"] else None


def take_picture(page: Page) -> None:
    if PICTURE:
        page.locator(".jp-Cell", has=page.locator(".widget-hslider")).locator(".jp-OutputArea-output").last.screenshot(
            path=PICTURE
        )
