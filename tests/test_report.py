"""The report of a graded class: its files, what a student may see, and submissions that would like to break it."""

import csv
import doctest
import io
import json
import re
import stat
from html.parser import HTMLParser
from pathlib import Path

import pytest

from labkit.errors import PlanError
from labkit.exercise import CaseResult, Gradebook, Idea, Measure, Result
from labkit.grade import gradescope, report, texts
from labkit.grade.pages import class_page, student_page
from labkit.grade.texts import cell, file_names, one_line, shown
from labkit.grade.withholding import for_student

SECRET = "SECRET-4711"
SCRIPT = "<script>document.title='broken'</script>"
BAD = (
    f"{SCRIPT}<img src=x onerror=\"document.title='broken'\">{{{{ 7*7 }}}}{{% raw %}}\x1b[31m\x00\udcff\u202e"
    + "A" * 5_000
)
NAMES = (
    "s01",
    "S01",
    "../x",
    "a/b",
    "a_b",
    "x" * 300,
    "line\nbreak",
    "",
    ".",
    "CON",
    "nul.txt",
    "=1+2",
    SCRIPT,
    "\x1b[31mred",
    "caf\udce9",
    "Zoë",
    "s01\u200b",
    "'s",
)


def made(
    question: str, *, points: int = 10, message: str = "", cases: tuple[CaseResult, ...] = (), **more: object
) -> Result:
    """A result with one criterion of four points and one of six, the second with hidden cases."""
    earned = (("sum", "every rank ends with the sum.", min(points, 4), 4), ("any", "any size.", max(points - 4, 0), 6))
    status = "full" if points == 10 else "partial" if points else "wrong"
    fields = {"title": "ring", "status": status, "earned": earned, "seconds": 1.5} | more
    return Result(
        question=question,
        score=points,
        max_score=10,
        message=message or "5 cases passed.",
        cases=cases or cases_of(points == 10),
        **fields,
    )


def cases_of(passed: bool) -> tuple[CaseResult, ...]:
    secrets = dict.fromkeys(("message", "where", "given", "got", "wanted"), SECRET)
    return (
        CaseResult(name="2 ranks", criterion="sum", hidden=False, outcome="returned", passed=True, seconds=0.75),
        CaseResult(
            name=f"sizes {SECRET}",
            criterion="any",
            hidden=True,
            outcome="returned" if passed else "raised",
            passed=passed,
            waits=((0, SECRET, SECRET),),
            measures=(Measure(name=SECRET, value=4711.25),),
            seconds=4711.25,
            **secrets,
        ),
    )


def book(students: tuple[str, ...] = ("s01", "s02"), points: int = 10, **more: object) -> Gradebook:
    questions = ("06.1", "06.2")
    results = {(student, question): made(question, points=points) for student in students for question in questions}
    return Gradebook(students=students, questions=questions, results=results, **more)


class Texts(HTMLParser):
    """What a browser would show of a page, and which scripts it has."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += f"{data} "


def test_the_files_of_a_report_are_the_owners_alone(tmp_path: Path) -> None:
    out = tmp_path / "new" / "report"
    assert report.write(book(), out) == out / "index.html"
    found = {path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file()}
    each = {f"{folder}/{name}" for folder, name in (("students", "s01.html"), ("students", "s02.html"))}
    each |= {f"gradescope/{name}/results.json" for name in ("s01", "s02")}
    assert found == {"index.html", "plotly.min.js", "results.json", "scores.csv"} | each
    for path in (out, *out.rglob("*")):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path
    report.write(book(points=4), out)  # again, over the first
    assert "8 of 20 points" in Texts((out / "students" / "s01.html").read_text()).text


def test_a_file_that_cannot_be_written_leaves_nothing_half_done(tmp_path: Path) -> None:
    (tmp_path / "scores.csv").mkdir()
    with pytest.raises(OSError):
        report.write(book(), tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"results.json", "scores.csv"}


def test_scores_for_an_lms(tmp_path: Path) -> None:
    students = ("s01", "=1+2", 'a,"b"\nc')
    report.write(book(students, points=7), tmp_path)
    raw = (tmp_path / "scores.csv").read_bytes()
    assert raw.startswith(b"student,06.1,06.2,total,max,percent,06.1 status,06.2 status\r\ns01,7,7,14,20,70.0,")
    rows = list(csv.reader(io.StringIO(raw.decode(), newline="")))
    assert [row[0] for row in rows[1:]] == ["s01", "'=1+2", 'a,"b"\\nc']
    assert rows[2][1:] == ["7", "7", "14", "20", "70.0", "partial", "partial"]


def test_cells_that_look_like_formulas_are_texts_and_can_be_read_back() -> None:
    for text in ("=1", "+1", "-1", "@x", "\t=1", "\r=1", "'=1", "''", "＝1", "s01", ""):
        written = cell(text)
        assert not written.startswith(tuple("=+-@\t\r＝"))
        assert written.removeprefix("'") == text


def test_results_json_has_everything(tmp_path: Path) -> None:
    whole = book(points=4, remarks={"s02": ("twice",)}, sandbox="none", seed=3)
    report.write(whole, tmp_path)
    plain = json.loads((tmp_path / "results.json").read_text(encoding="ascii"))
    assert (plain["schema"], plain["version"], plain["seed"], plain["sandbox"]) == ("labkit.grades", 1, 3, "none")
    assert plain["max_score"] == 20
    assert plain["questions"][0] == {"question": "06.1", "title": "ring", "max_score": 10}
    second = plain["students"][1]
    assert (second["student"], second["file"], second["score"], second["remarks"]) == ("s02", "s02", 8, ["twice"])
    assert second["results"] == json.loads(json.dumps([one.to_plain() for one in whole.of("s02")]))


def test_a_student_sees_of_hidden_cases_only_criterion_and_outcome(tmp_path: Path) -> None:
    idea = Idea(first="think of `chunks`", further="count <b>them")
    bad = made("06.1", points=4, message=SECRET, idea=idea)
    report.write(Gradebook(students=("s01",), questions=("06.1",), results={("s01", "06.1"): bad}), tmp_path)
    page = (tmp_path / "students" / "s01.html").read_text()
    assert SECRET not in page
    assert "4711" not in page
    text = " ".join(Texts(page).text.split())
    assert "Every visible case passed, but a hidden one did not (raised an error). It looks at: any size." in text
    assert "0 of 1 1 raised an error" in text
    assert "think of <code>chunks</code>" in page
    assert "count &lt;b&gt;them" in page
    form = json.loads((tmp_path / "gradescope" / "s01" / "results.json").read_text())
    told = [form["output"], *(json.dumps(one) for one in form["tests"] if one["visibility"] != "hidden")]
    assert all(SECRET not in one and "4711" not in one for one in told)
    for teachers in ("index.html", "results.json"):
        assert SECRET in (tmp_path / teachers).read_text(), teachers


def test_what_is_not_hidden_stays_as_it_is() -> None:
    whole = made("06.1", cases=(cases_of(True)[0],))
    assert for_student(whole) == whole


def test_gradescopes_form() -> None:
    form = gradescope.gradescope(book(points=4), "s01")
    assert form["score"] == 8
    assert form["execution_time"] == 1.5  # of the visible cases: a hidden one may take as long as its input says
    assert (form["output_format"], form["stdout_visibility"]) == ("text", "hidden")
    first, second, third = form["tests"][:3]
    assert first == {
        "name": "06.1 every rank ends with the sum.",
        "number": "06.1.1",
        "score": 4,
        "max_score": 4,
        "status": "passed",
        "output": "2 ranks: passed",
        "visibility": "visible",
    }
    assert (second["score"], second["status"], second["visibility"]) == (0, "failed", "after_published")
    assert second["output"] == "0 of 1 hidden cases passed."
    # Gradescope adds up only tests with points; one that nobody but instructors sees must not change a total.
    assert third["visibility"] == "hidden"
    assert "score" not in third
    assert "max_score" not in third
    assert SECRET in third["output"]
    assert sum(one.get("max_score", 0) for one in form["tests"]) == 20


def test_a_result_without_cases_is_one_test_of_gradescopes() -> None:
    gone = Result(question="06.1", title="ring", status="missing", score=0, max_score=10, message="no such function")
    form = gradescope.gradescope(Gradebook(students=("s",), questions=("06.1",), results={("s", "06.1"): gone}), "s")
    (test,) = form["tests"]
    assert (test["score"], test["max_score"], test["status"], test["output"]) == (0, 10, "failed", "no such function")


def test_names_become_safe_file_names() -> None:
    names = file_names(NAMES)
    assert set(names) == set(NAMES)
    assert len({one.casefold() for one in names.values()}) == len(NAMES)
    for one in names.values():
        assert re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,79}", one), one
        assert one.split(".")[0].lower() not in {"con", "nul"}
    assert names["a_b"] == "a_b"
    assert names["s01"] != "s01"  # on some disks it would be S01 too
    assert file_names(reversed(NAMES)) == names


def test_a_name_made_of_another_ones_hash_is_no_clash() -> None:
    stolen = file_names(["../x"])["../x"]
    names = file_names(["../x", stolen])
    assert names[stolen] == stolen
    assert names["../x"] != stolen


def test_texts_show_what_cannot_be_seen() -> None:
    assert shown("a\x1b]0;title\x07b\x1b[1mc\x9b\u2066\udcff\ud800") == "abc\\x9b\\u2066\\xff\\ud800"
    assert one_line("a\r\nb\tc\x1b[1m") == "a\\x0d\\nb\\tc\\x1b[1m"
    assert len(shown("x" * 5_000_000)) < 1_600
    assert doctest.testmod(texts).failed == 0


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report of names, messages, notes and numbers that were made to break one."""
    bad = CaseResult(
        name=BAD,
        criterion="sum",
        hidden=False,
        outcome="timeout",
        passed=False,
        message=BAD,
        where=BAD,
        given=BAD + "B" * 2_000_000,
        got=BAD,
        wanted=BAD,
        waits=((0, BAD, BAD),),
        measures=(
            Measure(name=BAD, value=10**5000, budget=4),
            Measure(name="b", value=float("nan"), budget=1.0),
            Measure(name="c", value="text"),  # type: ignore[arg-type]
        ),
    )
    results = {(name, "06.1"): made("06.1", points=0, message=BAD, cases=(bad,), notes=(BAD,)) for name in NAMES}
    out = tmp_path_factory.mktemp("hostile")
    report.write(
        Gradebook(students=NAMES, questions=("06.1",), results=results, remarks=dict.fromkeys(NAMES, (BAD,))), out
    )
    return out


def test_hostile_submissions_are_text_in_every_file(hostile: Path) -> None:
    pages = [hostile / "index.html", *(hostile / "students").iterdir()]
    assert len(pages) == len(NAMES) + 1
    for path in pages:
        page = Texts(path.read_text(encoding="utf-8"))
        assert path.stat().st_size < 500_000
        assert "img" not in [tag for tag, _ in page.tags]
        assert not any(name.startswith("on") for _, attributes in page.tags for name in attributes)
        assert "{{ 7*7 }}" in page.text
        assert not re.search("[\x00-\x08\x0b-\x1f\x7f\u202e\ud800-\udfff]", page.text)
        policy = next(one["content"] for _, one in page.tags if one.get("http-equiv") == "Content-Security-Policy")
        assert policy is not None
        assert policy.startswith("default-src 'none'")
        assert re.search(r"unsafe-eval|https?:", policy) is None
        scripts = [one for tag, one in page.tags if tag == "script"]
        assert len(scripts) == (3 if path.name == "index.html" else 0)
        assert all("nonce" in one or one.get("type") == "application/json" for one in scripts)
    assert (
        "<script>document.title='broken'</script>" in Texts((hostile / "index.html").read_text()).text
    )  # the true name, as text
    rows = list(csv.reader(io.StringIO((hostile / "scores.csv").read_text(encoding="utf-8"))))
    assert len(rows) == len(NAMES) + 1
    for path in hostile.rglob("results.json"):
        json.loads(path.read_text(encoding="ascii"))


@pytest.mark.parametrize("students", [(), ("s01",)])
@pytest.mark.parametrize("points", [0, 10])
def test_small_and_uniform_classes_have_a_report(tmp_path: Path, students: tuple[str, ...], points: int) -> None:
    page = Texts(report.write(book(students, points), tmp_path).read_text())
    assert f"{len(students)}student{'s' * (len(students) != 1)}" in "".join(page.text.split())
    assert ("No submissions." in page.text) == (not students)


def test_a_gradebook_that_lacks_a_result_is_refused() -> None:
    with pytest.raises(PlanError, match="1 results for 1 students x 2 questions"):
        Gradebook(students=("s01",), questions=("06.1", "06.2"), results={("s01", "06.1"): made("06.1")})


def test_the_page_of_the_class_counts_only_what_ran_as_hung_or_crashed() -> None:
    results = {
        ("s01", "06.1"): made("06.1", points=0, status="error", seconds=0.0),  # a file that cannot be read
        ("s02", "06.1"): made("06.1", points=0, status="crashed"),
    }
    page = class_page(
        Gradebook(students=("s01", "s02"), questions=("06.1",), results=results, sandbox="none: of `x`"),
        {"s01": "s01", "s02": "s02"},
    )
    assert "<dd>1</dd><dt>answers that raised, hung or crashed</dt>" in page
    assert "seed 0. None: of `x`.</p>" in page


def test_code_in_remarks_is_code_in_pages_and_plain_for_gradescope() -> None:
    whole = book(("s01",), remarks={"s01": ("`f < g` is twice",)})
    for page in (class_page(whole, {"s01": "s01"}), student_page(whole, "s01")):
        assert "<code>f &lt; g</code> is twice" in page
    assert gradescope.gradescope(whole, "s01")["output"].startswith("f < g is twice")
