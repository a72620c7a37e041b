"""The rules of the house that a program can check; import contracts are `lint-imports` in `make check`."""

import ast
import json
import re
import statistics
import subprocess
import sys

import pytest

MAX_FILE_LINES = 400
MEDIAN_FILE_LINES = 200
MAX_FUNCTION_LINES = 40
FUNCTIONS_WITHIN = 0.9
HEAVY = ("anywidget", "deepspeed", "ipyparallel", "ipywidgets", "jupyterlab", "numpy", "plotly", "torch")

CHECK_ALL = """
import importlib, json, sys, warnings
warnings.simplefilter("ignore")
wrong = {}
for name in json.loads(sys.argv[1]):
    module = importlib.import_module(name)
    listed = getattr(module, "__all__", None)
    if listed is not None:
        missing = [one for one in listed if not hasattr(module, one)]
        twice = sorted({one for one in listed if listed.count(one) > 1})
        if missing or twice:
            wrong[name] = {"missing": missing, "twice": twice}
print(json.dumps(wrong))
"""


@pytest.fixture(scope="module")
def sources(repository):
    """The text of every file of the package by its path from the repository."""
    paths = sorted((repository / "labkit").rglob("*.py"))
    return {path.relative_to(repository).as_posix(): path.read_text() for path in paths}


@pytest.fixture(scope="module")
def trees(sources):
    return {path: ast.parse(text) for path, text in sources.items()}


def module_name(path):
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def functions(trees):
    """Every function as (length in lines, where)."""
    for path, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield node.end_lineno - node.lineno + 1, f"{path}:{node.lineno} {node.name}"


def run_python(repository, code, *arguments):
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, cwd=repository, timeout=240
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.strip().splitlines()[-1])


def test_files_fit_on_few_screens(sources):
    lengths = {path: text.count("\n") for path, text in sources.items()}
    assert {path: length for path, length in lengths.items() if length > MAX_FILE_LINES} == {}
    assert statistics.median(lengths.values()) <= MEDIAN_FILE_LINES


def test_tests_and_benchmarks_fit_too(repository):
    paths = [*(repository / "tests").rglob("*.py"), *(repository / "benchmarks").rglob("*.py")]
    lengths = {path.relative_to(repository).as_posix(): path.read_text().count("\n") for path in paths}
    assert {path: length for path, length in lengths.items() if length > MAX_FILE_LINES} == {}


def test_nine_functions_in_ten_fit_on_one_screen(trees):
    found = sorted(functions(trees), reverse=True)
    long = [f"{length} lines: {where}" for length, where in found if length > MAX_FUNCTION_LINES]
    allowed = int(len(found) * (1 - FUNCTIONS_WITHIN))
    assert len(long) <= allowed, f"{len(long)} of {len(found)} functions are too long:\n" + "\n".join(long)


def test_no_module_is_a_drawer_for_everything(sources):
    drawers = {"utils", "util", "helpers", "common", "misc"}
    assert [path for path in sources if path.rsplit("/", 1)[-1].removesuffix(".py") in drawers] == []


def test_every_module_says_what_it_is_for(trees):
    assert [path for path, tree in trees.items() if not ast.get_docstring(tree)] == []


def test_assert_never_checks_input(trees):
    found = [
        f"{path}:{node.lineno}"
        for path, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Assert)
    ]
    assert found == []


def test_readme_maps_every_module(repository, sources):
    """One line per file; a package's `__init__` stands for the package as `name/`."""
    text = (repository / "README.md").read_text()
    mapped = set(re.findall(r"`(labkit/[\w/.]*)`", text))
    wanted = {path.removesuffix("__init__.py") for path in sources}
    assert wanted - mapped == set(), "missing in the file map"
    assert mapped - wanted == set(), "in the file map, but not in the tree"


def test_import_labkit_loads_nothing_heavy(repository):
    code = "import json, sys\nimport labkit as lk\ndir(lk)\nprint(json.dumps(sorted(sys.modules)))"
    loaded = run_python(repository, code)
    assert [name for name in loaded if name.split(".")[0] in HEAVY] == []
    assert [name for name in loaded if name.startswith("labkit.")] == []


@pytest.mark.parametrize("name", ["errors", "spec", "schedule", "trace", "plan", "predict", "compare", "wire"])
def test_pure_modules_load_nothing_heavy(repository, name):
    code = f"import json, sys\nimport labkit.{name}\nprint(json.dumps(sorted(sys.modules)))"
    loaded = run_python(repository, code)
    heavy = set(HEAVY) - {"numpy"}
    assert [one for one in loaded if one.split(".")[0] in heavy] == []


def test_lazy_submodules_are_the_ones_listed(repository):
    code = (
        "import json, labkit as lk\n"
        "names = [one for one in lk.__all__ if one != '__version__']\n"
        "print(json.dumps([getattr(lk, one).__name__ == 'labkit.' + one for one in names]))"
    )
    assert all(run_python(repository, code))


def test_public_names_exist_and_stand_once(repository, sources):
    runnable = {"labkit.__main__", "labkit.bootstrap"}
    names = [name for path in sources if (name := module_name(path)) not in runnable]
    assert run_python(repository, CHECK_ALL, json.dumps(names)) == {}


def test_packages_say_what_is_public(repository, trees):
    facades = {
        path: any(
            isinstance(node, ast.Assign) and any(getattr(one, "id", "") == "__all__" for one in node.targets)
            for node in tree.body
        )
        for path, tree in trees.items()
        if path.endswith("__init__.py") and not path.startswith("labkit/rank/")
    }
    assert [path for path, has_all in facades.items() if not has_all] == []


def test_repository_names_no_machine_and_no_registry(repository):
    listed = subprocess.run(["git", "ls-files"], cwd=repository, capture_output=True, text=True, timeout=60)
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    hosts = re.compile(r"\bpypi\.org|pythonhosted\.org|deb\.debian\.org|registry\.npmjs\.org|/work/(?:main|shared)")
    found = {}
    for name in listed.stdout.splitlines():
        path = repository / name
        if path.suffix in {".png", ".svg", ".gif"} or path.name == "test_architecture.py" or not path.is_file():
            continue
        if match := hosts.search(path.read_text(encoding="utf-8", errors="replace")):
            found[name] = match[0]
    assert found == {}
