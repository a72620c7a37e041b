"""Set-up: what it refuses, what it says first, when it does nothing, how it resumes."""

import ast
import json
import os
import pathlib
import signal
import subprocess
import sys

import pytest

from labkit import installation, pip_install

GB = 10**9


def run_bootstrap(repository, *arguments, version=None, path=None):
    """Run bootstrap.py as a script, if asked under a made-up Python version and PATH."""
    script = str(repository / "labkit" / "bootstrap.py")
    code = "import runpy, sys\n"
    if version:
        code += f"sys.version_info = {version!r}\n"
    code += f"sys.argv = {[script, *arguments]!r}\nrunpy.run_path({script!r}, run_name='__main__')"
    env = {**os.environ, "PATH": str(path)} if path else dict(os.environ)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=60)


def make_venv(folder, version="3.11.7"):
    """A `.venv` that looks whole to the set-up."""
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "python").symlink_to(sys.executable)
    (folder / "pyvenv.cfg").write_text(f"home = /somewhere\nversion = {version}\n")
    return folder


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A made-up checkout that the set-up works on; it goes there, and takes a signal, which ends with the test."""
    monkeypatch.chdir(tmp_path)
    before = signal.getsignal(signal.SIGTERM)
    (tmp_path / "pyproject.toml").write_text("[project.optional-dependencies]\ndev = []\ngpu = []\n")
    (tmp_path / "constraints.txt").write_text("torch==2.13.0\nnumpy==2.0.0\n")
    monkeypatch.setattr(installation, "REPOSITORY", tmp_path)
    monkeypatch.setattr(installation, "VENV", tmp_path / ".venv")
    monkeypatch.delenv("EXTRAS", raising=False)
    monkeypatch.delenv("TORCH_INDEX", raising=False)
    yield tmp_path
    signal.signal(signal.SIGTERM, before)


def write_stamp(project, **changes):
    stamp = {"made_from": installation.stamp_text("dev"), "torch_index": "", **changes}
    (project / ".venv" / "labkit-stamp.json").write_text(json.dumps(stamp))


def test_old_interpreters_can_parse_bootstrap(repository):
    source = (repository / "labkit" / "bootstrap.py").read_text()
    ast.parse(source, feature_version=(3, 6))


def test_old_python_gets_one_line(repository, tmp_path):
    done = run_bootstrap(repository, "lab", version=(3, 6, 9, "final", 0), path=tmp_path)
    assert done.returncode == 1
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("labkit: this is Python 3.6 and labkit needs 3.11, 3.12 or 3.13")


def test_old_python_hands_over_to_a_newer_one_on_the_path(repository, tmp_path):
    stand_in = tmp_path / "python3.12"
    stand_in.write_text('#!/bin/sh\n[ "$1" = -c ] && exit 0\necho "taken: $*"\n')
    stand_in.chmod(0o755)
    done = run_bootstrap(repository, "lab", version=(3, 6, 9, "final", 0), path=tmp_path)
    assert done.returncode == 0
    assert done.stdout.startswith("taken: ")
    assert done.stdout.rstrip().endswith("bootstrap.py lab")


def test_unknown_action_gets_one_line(repository):
    done = run_bootstrap(repository, "laab")
    assert done.returncode == 1
    assert done.stderr.startswith("labkit: say what to do: lab, test, check, bench, setup")
    assert "Traceback" not in done.stderr


def test_default_linux_build_is_announced_as_several_gb():
    cost = installation.need(torch_index="", platform="linux", has_torch=False)
    assert cost.download_bytes >= 3 * GB
    assert cost.disk_bytes >= 7 * GB
    assert "CUDA" in cost.what


@pytest.mark.parametrize(
    ("torch_index", "platform", "has_torch"),
    [("address", "linux", False), ("", "darwin", False), ("", "linux", True)],
)
def test_small_installs_are_announced_as_small(torch_index, platform, has_torch):
    assert installation.need(torch_index=torch_index, platform=platform, has_torch=has_torch).disk_bytes < 3 * GB


def test_announcement_names_sizes_and_the_small_build(project, capsys):
    installation.announce(installation.need(torch_index="", platform="linux", has_torch=False), "")
    said = capsys.readouterr().out
    assert "download: up to 3.5 GB" in said
    assert "up to 9.0 GB" in said
    assert "TORCH_INDEX=" in said


def test_full_disk_gets_one_line_with_both_numbers(project):
    cost = installation.Need(download_bytes=1, disk_bytes=10**18, what="a very large build")
    with pytest.raises(SystemExit) as refused:
        installation.check_machine(cost)
    text = str(refused.value)
    assert "GB of disk is free" in text
    assert "1000000000.0 GB is needed (a very large build)" in text
    assert "\n" not in text


def test_missing_venv_module_names_the_package(project, monkeypatch):
    find_spec = installation.importlib.util.find_spec
    monkeypatch.setattr(
        installation.importlib.util, "find_spec", lambda name: None if name == "ensurepip" else find_spec(name)
    )
    with pytest.raises(SystemExit, match=r"no ensurepip module: .* apt-get install python3\.\d+-venv"):
        installation.check_machine(installation.Need(download_bytes=0, disk_bytes=0, what=""))


def test_a_fitting_stamp_means_nothing_to_do(project):
    make_venv(project / ".venv")
    write_stamp(project)
    assert installation.up_to_date("dev", "")
    installation.set_up("dev", "")  # would need a network otherwise


@pytest.mark.parametrize("file", ["pyproject.toml", "constraints.txt"])
def test_changed_lists_make_the_stamp_stale(project, file):
    make_venv(project / ".venv")
    write_stamp(project)
    with (project / file).open("a") as list_of_packages:
        list_of_packages.write("# one more line\n")
    assert not installation.up_to_date("dev", "")


def test_other_python_extras_or_torch_make_the_stamp_stale(project):
    make_venv(project / ".venv")
    write_stamp(project)
    assert not installation.up_to_date("dev,gpu", "")
    assert not installation.up_to_date("dev", "another index")
    (project / ".venv" / "pyvenv.cfg").write_text("version = 3.12.1\n")
    assert not installation.up_to_date("dev", "")


def test_a_cpu_torch_stays_when_the_index_is_not_named_again(project):
    make_venv(project / ".venv")
    write_stamp(project, torch_index="an index")
    assert installation.up_to_date("dev", "")
    assert installation.up_to_date("dev", "an index")


@pytest.mark.parametrize("stamp", ["", "{", "[]", "null", "3"])
def test_a_broken_stamp_counts_as_none(project, stamp):
    make_venv(project / ".venv")
    (project / ".venv" / "labkit-stamp.json").write_text(stamp)
    assert not installation.up_to_date("dev", "")


def test_a_venv_whose_interpreter_is_gone_counts_as_broken(project):
    make_venv(project / ".venv")
    (project / ".venv" / "bin" / "python").unlink()
    (project / ".venv" / "bin" / "python").symlink_to("/nowhere/python")
    assert installation.venv_python_version(project / ".venv") == ""


def test_torch_comes_before_what_builds_against_it(project, monkeypatch):
    make_venv(project / ".venv")
    calls = []
    monkeypatch.setattr(installation, "make_venv", lambda: None)
    monkeypatch.setattr(pip_install, "run", lambda python, arguments, **_: calls.append(list(arguments)))
    installation.install("dev", "an index")
    assert "setuptools" in calls[0]
    assert calls[1][:4] == ["--no-deps", "torch==2.13.0", "--index-url", "an index"]
    assert calls[2][0] == "torch==2.13.0"
    assert calls[3][:3] == ["--no-build-isolation", "-e", f"{project}[dev]"]
    assert all("--index-url" not in arguments for arguments in (calls[0], *calls[2:]))
    assert installation.up_to_date("dev", "an index")


def test_a_failed_install_leaves_no_stamp(project, monkeypatch):
    make_venv(project / ".venv")
    write_stamp(project, made_from="something older")
    monkeypatch.setattr(installation, "make_venv", lambda: None)

    def fail(*_, **__):
        raise pip_install.InstallError("pip could not install everything: no such package")

    monkeypatch.setattr(pip_install, "run", fail)
    with pytest.raises(SystemExit, match="labkit: pip could not install everything: no such package"):
        installation.main(["setup"])
    assert not (project / ".venv" / "labkit-stamp.json").exists()


def test_unknown_extras_are_named(project, monkeypatch):
    monkeypatch.setenv("EXTRAS", "gpus")
    with pytest.raises(SystemExit, match="EXTRAS=gpus is unknown: there are dev, gpu"):
        installation.main(["setup"])


def test_half_installed_packages_are_forgotten(tmp_path):
    whole, half = tmp_path / "whole-1.0.dist-info", tmp_path / "half-2.0.dist-info"
    for info in (whole, half):
        (info / "licenses").mkdir(parents=True)
        (info / "METADATA").write_text("Name: x\n")
        (info / "licenses" / "LICENSE").write_text("")
    (whole / "RECORD").write_text("")
    assert pip_install.repair(tmp_path) == ["half"]
    assert whole.exists()
    assert not half.exists()
    assert pip_install.repair(tmp_path) == []


def test_progress_follows_what_pip_says():
    progress = pip_install.Progress(expected=10)
    progress.feed("Collecting torch==2.13.0 (from -r x)")
    progress.feed("Requirement already satisfied: numpy in /x")
    assert progress.text(elapsed_s=5).split() == ["0:05", "[", "2", "of", "about", "10]", "finding", "numpy"]
    progress.feed("  Downloading torch-2.13.0-cp311-cp311-manylinux_2_28_x86_64.whl (780.0 MB)")
    progress.feed("Progress 104857600 of 817889280")
    assert "downloading torch 2.13.0  100 of 780 MiB" in progress.text(elapsed_s=65)
    assert progress.text(elapsed_s=65).startswith("   1:05")
    progress.feed("Building wheel for deepspeed (pyproject.toml): started")
    assert "building deepspeed" in progress.text(elapsed_s=70)
    progress.feed("Installing collected packages: a, b, c")
    assert "[  7 of about 10]  installing 3 packages" in progress.text(elapsed_s=70, num_installed=7)
    progress.feed("")
    progress.feed("anything else")
    assert "installing 3 packages" in progress.text(elapsed_s=70)


def test_progress_never_counts_past_the_expected():
    progress = pip_install.Progress(expected=2)
    for name in "abc":
        progress.feed(f"Collecting {name}")
    assert "[  2 of about 2]" in progress.text(elapsed_s=0)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device", "disk is full"),
        ("WARNING: Retrying after connection broken by 'NewConnectionError(...)'", "package index cannot be reached"),
        ("ERROR: No matching distribution found for nothing==1", "No matching distribution found for nothing==1"),
        ("error: subprocess-exited-with-error", "subprocess-exited-with-error"),
    ],
)
def test_pip_errors_become_one_line(line, said):
    text = pip_install.explain(["Collecting x", line])
    assert said in text
    assert "\n" not in text
    assert pip_install.explain([])


def test_a_failing_pip_raises_one_line_and_keeps_the_log(tmp_path, capsys):
    stand_in = tmp_path / "python"
    stand_in.write_text("#!/bin/sh\necho 'Collecting x'\necho 'Progress 1 of 2'\necho 'ERROR: no way' >&2\nexit 1\n")
    stand_in.chmod(0o755)
    log = tmp_path / "log"
    with pytest.raises(pip_install.InstallError, match="pip could not install everything: no way"):
        pip_install.run(stand_in, ["x"], log=log, expected=1, started_s=0.0, count_installed=lambda: 0)
    logged = log.read_text()
    assert "Collecting x" in logged
    assert "Progress" not in logged
    assert "starting pip" in capsys.readouterr().out


def test_check_runs_every_tool_even_after_a_failure(project, monkeypatch, capfd):
    failing, passing = [sys.executable, "-c", "raise SystemExit(3)"], [sys.executable, "-c", "print('second ran')"]
    assert installation.run_all([failing, passing]) == 1
    said = capfd.readouterr()
    assert "second ran" in said.out
    assert "labkit: failed:" in said.err
    assert installation.run_all([passing]) == 0


def test_actions_are_the_commands_of_the_makefile(repository):
    makefile = (repository / "Makefile").read_text()
    for action in ("lab", "test", "check", "bench"):
        assert f"labkit/bootstrap.py {action}" in makefile
        assert installation.commands(action, [])
    assert [pathlib.Path(line[0]).name for line in installation.commands("check", [])] == [
        "ruff",
        "ruff",
        "mypy",
        "lint-imports",
    ]


def test_commands_run_as_in_an_activated_environment(monkeypatch):
    monkeypatch.setenv("PYTHONHOME", "/elsewhere")
    variables = installation.environment()
    assert variables["PATH"].split(os.pathsep)[0] == str(installation.VENV / "bin")
    assert variables["VIRTUAL_ENV"] == str(installation.VENV)
    assert "PYTHONHOME" not in variables
