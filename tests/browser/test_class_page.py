"""The page of a class in a real browser: plots are drawn, the table sorts, links lead on, no foreign script runs."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

from labkit.exercise import Gradebook, Result
from labkit.grade import report

SCRIPT = "<script>document.title='broken'</script><img src=x onerror=\"document.title='broken'\">"
SCORES = {"s02": (10, 4), "s10": (0, 10), "s1": (4, 0), SCRIPT: (4, 10)}

# Whether the titles of the plots have the colour of the page's text.
SAME_INK = """
() => [...document.querySelectorAll('.gtitle')].every(
  one => getComputedStyle(one).fill === getComputedStyle(document.body).color)
"""

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    results = {}
    for student, scores in SCORES.items():
        for question, score in zip(("06.1", "06.2"), scores, strict=True):
            results[student, question] = Result(
                question=question,
                title="ring all-reduce",
                status="full" if score == 10 else "partial" if score else "wrong",
                score=score,
                max_score=10,
                message=SCRIPT,
                earned=(("sum", f"every rank ends with the sum {SCRIPT}", score, 10),),
                notes=(SCRIPT,),
                seconds=0.5 + score,
            )
    out = tmp_path_factory.mktemp("class")
    report.write(Gradebook(students=tuple(SCORES), questions=("06.1", "06.2"), results=results), out)
    return out


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]
        started = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=flags)
        yield started
        started.close()


def opened(browser: Browser, path: Path) -> tuple[Page, list[str]]:
    """The page, and everything that it or the browser complains of or asks a network for."""
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.set_default_timeout(60_000)
    complaints: list[str] = []
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda one: None if one.url.startswith(("file:", "data:")) else complaints.append(one.url))
    page.goto(path.as_uri())
    return page, complaints


def students(page: Page) -> list[str]:
    return page.locator("table.sortable tbody th > a:first-child").all_inner_texts()


def test_plots_are_drawn_in_the_colours_of_the_page(browser: Browser, folder: Path) -> None:
    page, complaints = opened(browser, folder / "index.html")
    page.wait_for_function("() => document.querySelectorAll('.plot .main-svg .gtitle').length >= 4")
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        page.wait_for_function(SAME_INK)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert page.title() == "Grades of 4 students"
    assert complaints == []
    page.close()


def test_the_table_sorts_by_click_and_by_key(browser: Browser, folder: Path) -> None:
    page, complaints = opened(browser, folder / "index.html")
    assert students(page) == list(SCORES)
    heading = page.locator("table.sortable").get_by_role("columnheader", name="Student", exact=True)
    heading.get_by_role("button").click()
    assert students(page) == [SCRIPT, "s1", "s02", "s10"]  # numbers in names count as numbers
    assert heading.get_attribute("aria-sort") == "ascending"
    total = page.locator("table.sortable").get_by_role("columnheader", name="Total", exact=True)
    total.get_by_role("button").focus()
    page.keyboard.press("Enter")
    assert students(page)[0] == "s1"
    page.keyboard.press("Enter")
    assert set(students(page)[:2]) == {"s02", SCRIPT}
    assert total.get_attribute("aria-sort") == "descending"
    assert heading.get_attribute("aria-sort") is None
    assert complaints == []
    page.close()


def test_a_mark_leads_to_the_answer_and_no_foreign_script_runs(browser: Browser, folder: Path) -> None:
    page, complaints = opened(browser, folder / "index.html")
    row = page.locator("table.sortable tbody tr").nth(3)
    row.locator("td a").nth(1).click()
    page.wait_for_url("**/students/*.html#q-06-2")
    assert page.locator("h1").inner_text() == SCRIPT
    assert page.title() == f"{SCRIPT}: 14 of 20 points"
    assert page.locator("#q-06-2 h2").inner_text() == "06.2 ring all-reduce"
    assert complaints == []
    page.close()
