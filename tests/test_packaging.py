"""What is declared once stays true everywhere: dependencies, pins, conda, versions, entry points, the licence."""

import ast
import importlib.metadata
import re
import stat
import sys
import tomllib

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

import labkit

# What only some platforms install, and torch itself pins.
BROUGHT_BY_TORCH = ("nvidia-", "cuda-", "triton")


@pytest.fixture(scope="module")
def project(repository):
    return tomllib.loads((repository / "pyproject.toml").read_text())["project"]


@pytest.fixture(scope="module")
def pins(repository):
    """The versions of constraints.txt by canonical name."""
    lines = (repository / "constraints.txt").read_text().splitlines()
    requirements = [Requirement(line) for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(one.name): one for one in requirements}


def declared(project, *extras):
    lists = [project["dependencies"], *(project["optional-dependencies"][extra] for extra in extras)]
    return [Requirement(line) for requirements in lists for line in requirements]


def exact(pin):
    (specifier,) = pin.specifier
    assert specifier.operator == "==", f"{pin} is no exact pin"
    return Version(specifier.version)


def test_every_pin_is_exact_sorted_and_plain(repository, pins):
    text = (repository / "constraints.txt").read_text()
    names = [line.split("==")[0] for line in text.splitlines() if line and not line.startswith("#")]
    assert names == sorted(names, key=str.lower)
    assert len(names) == len(pins)
    for pin in pins.values():
        assert exact(pin).local is None, f"{pin}: a build label fits one kind of machine only"
    assert not re.search(r"https?:|file:|@", text)


def test_pins_of_the_named_packages(pins):
    named = {
        "torch": "2.13.0",
        "deepspeed": "0.19.8",
        "ipyparallel": "9.2.0",
        "jupyterlab": "4.6.6",
        "ipywidgets": "8.1.9",
        "plotly": "7.1.0",
        "anywidget": "0.11.0",
        "ipykernel": "7.4.0",
        "jupyter-client": "8.10.0",
        "nbclient": "0.11.0",
    }
    assert {name: str(exact(pins[name])) for name in named} == named


def test_every_declared_package_is_pinned_to_a_version_it_accepts(project, pins):
    for requirement in declared(project, "dev", "gpu", "nbgrader"):
        name = canonicalize_name(requirement.name)
        assert name in pins, f"{requirement} has no line in constraints.txt"
        assert requirement.specifier.contains(exact(pins[name])), f"{requirement} refuses its own pin {pins[name]}"


def test_everything_that_gets_installed_is_pinned_and_installed_as_pinned(project, pins):
    waiting = [(one, "labkit") for one in declared(project, "dev")]
    seen = set()
    while waiting:
        requirement, wanted_by = waiting.pop()
        name = canonicalize_name(requirement.name)
        if name in seen or name.startswith(BROUGHT_BY_TORCH):
            continue
        try:
            found = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # a marker or extra that this platform does not take
        seen.add(name)
        assert name in pins, f"{name} ({wanted_by} needs it) has no line in constraints.txt"
        assert Version(found.version).public == str(exact(pins[name])), f"{name} is installed as {found.version}"
        for line in found.requires or ():
            deeper = Requirement(line)
            if deeper.marker is None or deeper.marker.evaluate({"extra": ""}):
                waiting.append((deeper, name))
    assert {"torch", "deepspeed", "jupyterlab", "pytest"} <= seen


def test_environment_yml_is_pyproject_in_condas_words(repository, project):
    lines = [line.strip() for line in (repository / "environment.yml").read_text().splitlines()]
    listed = [line[2:] for line in lines if line.startswith("- ")]
    python = next(line for line in listed if line.startswith("python"))
    newest = max(
        int(found[1])
        for line in project["classifiers"]
        if (found := re.fullmatch(r"Programming Language :: Python :: 3\.(\d+)", line))
    )
    wanted = SpecifierSet(f"{project['requires-python']},<3.{newest + 1}")
    assert SpecifierSet(python.removeprefix("python")) == wanted
    assert "name: labkit" in lines
    # Everything else comes from pyproject.toml through "-e .": a second list could only drift.
    assert set(listed) == {"conda-forge", python, "pip", "pip:", "-c constraints.txt", "-e ."}


def test_bootstrap_accepts_the_pythons_of_pyproject(repository, project):
    tree = ast.parse((repository / "labkit" / "bootstrap.py").read_text())
    bounds = {
        node.targets[0].id: ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and node.targets[0].id in {"OLDEST", "NEWEST"}
    }
    classifiers = "\n".join(project["classifiers"])
    assert project["requires-python"] == f">=3.{bounds['OLDEST'][1]}"
    for minor in range(bounds["OLDEST"][1], bounds["NEWEST"][1] + 1):
        assert f"Python :: 3.{minor}" in classifiers
    assert f"Python :: 3.{bounds['NEWEST'][1] + 1}" not in classifiers


def test_what_the_package_imports_is_declared(repository, project):
    wanted = {canonicalize_name(one.name) for one in declared(project, "gpu")}
    providers = importlib.metadata.packages_distributions()
    undeclared = {}
    for path in (repository / "labkit").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module or ""]
            for name in {name.split(".")[0] for name in names} - {"labkit", "transformer_engine"}:
                given_by = {canonicalize_name(package) for package in providers.get(name, [name])}
                if name not in sys.stdlib_module_names and not given_by & wanted:
                    undeclared.setdefault(name, set()).add(str(path.relative_to(repository)))
    assert undeclared == {}


def test_version_is_said_once(repository, project):
    assert "version" in project["dynamic"]
    assert importlib.metadata.version("labkit") == labkit.__version__
    assert f"## {labkit.__version__}" in (repository / "CHANGELOG.md").read_text()


def test_entry_points_name_things_that_exist():
    found = {(point.group, point.name): point for point in importlib.metadata.distribution("labkit").entry_points}
    assert set(found) == {
        ("console_scripts", "labkit"),
        ("ipyparallel.controller_launchers", "labkit"),
        ("ipyparallel.engine_launchers", "labkit"),
    }
    for point in found.values():
        assert callable(point.load())


def test_licence_is_apache_2(repository, project):
    text = (repository / "LICENSE").read_text()
    assert project["license"] == "Apache-2.0"
    assert "Apache License\n                           Version 2.0, January 2004" in text
    assert "END OF TERMS AND CONDITIONS" in text


def test_ci_runs_what_a_person_runs(repository):
    script = repository / ".ci" / "run"
    text = script.read_text()
    assert script.stat().st_mode & stat.S_IXUSR
    assert text.startswith("#!/usr/bin/env bash\n")
    assert "set -euo pipefail" in text
    assert "export LABKIT_REQUIRE=browser" in text
    assert text.rstrip().endswith("make test\nmake check")
