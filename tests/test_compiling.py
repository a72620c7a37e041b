"""Compiling DeepSpeed's operations: once, side by side, and one line where it cannot be. The compiler is a stand-in."""

import json
import os
import pathlib
import subprocess
import sys
import time

import psutil
import pytest

from labkit import cli, compiled, compiling, installation
from labkit.errors import LabError

BUILD = """
import os, pathlib, sys
folder = pathlib.Path(os.environ["TORCH_EXTENSIONS_DIR"])
name = {"CPUAdamBuilder": "cpu_adam", "ShareMemCommBuilder": "deepspeed_shm_comm"}[sys.argv[1]]
(folder / name).mkdir()
(folder / name / f"{name}.so").symlink_to(sys.executable)
"""


@pytest.fixture
def prefix(tmp_path, monkeypatch):
    """A made-up environment that this process takes for its own."""
    packages = tmp_path / "lib" / "python3.11" / "site-packages"
    for name in ("deepspeed-0.19.8", "torch-2.13.0"):
        (packages / f"{name}.dist-info").mkdir(parents=True)
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setattr(compiling, "missing_tools", list)
    monkeypatch.setattr(compiling, "_BUILD", BUILD)
    return tmp_path


def test_it_compiles_once_and_knows_it(prefix, capsys):
    assert compiled.why_not("cpu_adam").startswith("it is not in ")
    assert cli.main(["compile"], {}) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0].split(maxsplit=1)[1] == "compiling for DeepSpeed (once, some minutes): cpu_adam, deepspeed_shm_comm"
    assert said[-1] == f"DeepSpeed's operations are now in {prefix}/torch_extensions"
    assert [compiled.why_not(name) for name in compiled.OPERATIONS] == ["", ""]
    assert cli.main(["compile"], {}) == 0
    assert capsys.readouterr().out == f"DeepSpeed's operations are already in {prefix}/torch_extensions\n"


def test_another_version_is_compiled_anew(prefix):
    assert compiling.compile_operations()
    packages = prefix / "lib" / "python3.11" / "site-packages"
    (packages / "torch-2.13.0.dist-info").rename(packages / "torch-2.14.0.dist-info")
    assert "other versions" in compiled.why_not("cpu_adam")
    assert compiling.compile_operations()
    assert compiled.why_not("cpu_adam") == ""


@pytest.mark.parametrize("num_bytes", [None, 0, 4096])
def test_a_library_that_is_gone_or_cut_short_is_compiled_anew(prefix, num_bytes):
    """Loading one that was cut short can end a rank by SIGBUS."""
    assert compiling.compile_operations()
    library = compiled.library("cpu_adam")
    library.unlink()
    if num_bytes is not None:
        library.write_bytes(pathlib.Path(sys.executable).read_bytes()[:num_bytes])
    said = compiled.why_not("cpu_adam")
    assert said == (f"it is not in {compiled.folder()}" if num_bytes is None else f"{library} is cut short")
    assert compiled.why_not("deepspeed_shm_comm") == ""
    assert compiling.compile_operations()
    assert compiled.why_not("cpu_adam") == ""


def test_what_a_killed_build_left_is_removed(prefix):
    left = compiled.folder() / "cpu_adam" / "lock"
    left.parent.mkdir(parents=True)
    left.touch()
    assert compiling.compile_operations()
    assert not left.exists()


@pytest.mark.parametrize("stamp", ["", "{", "[]", "null"])
def test_a_broken_stamp_counts_as_none(prefix, stamp):
    compiled.folder().mkdir()
    (compiled.folder() / compiled.STAMP).write_text(stamp)
    assert not compiled.is_current(prefix)


def test_a_missing_tool_is_one_line(prefix, monkeypatch, capsys):
    monkeypatch.setattr(compiling, "missing_tools", lambda: ["a C++ compiler (g++)", "ninja"])
    assert cli.main(["compile"], {}) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    assert "for lack of a C++ compiler (g++), ninja: offloaded AdamW needs them" in said.err
    assert not compiled.folder().exists()


def test_tools_are_looked_for(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert compiling.missing_tools()[:2] == ["a C++ compiler (g++)", "ninja"]


def test_a_failed_compilation_is_one_line_and_leaves_no_stamp(prefix, monkeypatch):
    monkeypatch.setattr(compiling, "_BUILD", "raise SystemExit('x.cpp:1: fatal error: no such header')")
    with pytest.raises(LabError, match=r"cpu_adam and deepspeed_shm_comm did not compile: x\.cpp:1: fatal error"):
        compiling.compile_operations()
    assert not (compiled.folder() / compiled.STAMP).exists()


def test_too_long_a_compilation_is_ended(prefix, monkeypatch):
    monkeypatch.setattr(compiling, "_BUILD", "import time; time.sleep(600)")
    before = set(psutil.Process().children(recursive=True))  # other tests' ranks
    with pytest.raises(LabError, match=r"cpu_adam and deepspeed_shm_comm did not compile within 0\.2 s"):
        compiling.compile_operations(timeout_s=0.2)
    assert set(psutil.Process().children(recursive=True)) <= before


def test_a_compilation_ends_with_who_started_it(tmp_path, repository):
    script = tmp_path / "starts.py"
    script.write_text(
        "import os, subprocess, sys, time\n"
        "from labkit import compiling\n"
        "code = compiling._BUILD.split('import deepspeed')[0]\n"
        'code += \'import subprocess; one = subprocess.Popen(["setsid", "sleep", "600"]);\'\n'
        "code += 'print(one.pid, flush=True); time.sleep(600)'\n"
        "arguments = [sys.executable, '-c', code, 'x', str(os.getpid())]\n"
        "subprocess.Popen(arguments, start_new_session=True)\n"
        "time.sleep(600)\n"
    )
    env = {**os.environ, "PYTHONPATH": str(repository)}
    owner = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True, env=env)
    try:
        pid = int(owner.stdout.readline())
    finally:
        owner.kill()
        owner.wait()
        owner.stdout.close()
    deadline = time.monotonic() + 60
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_set_up_has_it_done_and_goes_on_without(prefix, monkeypatch):
    calls = []
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)  # `make test` sets it
    monkeypatch.setattr(installation, "VENV", prefix)
    monkeypatch.setattr(subprocess, "run", lambda command, **options: calls.append((command, options)))
    installation.compile_operations()
    assert calls[0][0] == [f"{prefix}/bin/python", "-m", "labkit", "compile"]
    assert calls[0][1]["env"]["TORCH_EXTENSIONS_DIR"] == f"{prefix}/torch_extensions"
    assert not calls[0][1]["check"]
    for name in compiled.OPERATIONS:
        compiled.library(name).parent.mkdir(parents=True)
        compiled.library(name).symlink_to(sys.executable)
    (compiled.folder() / compiled.STAMP).write_text(json.dumps(compiled.made_from(pathlib.Path(prefix))))
    installation.compile_operations()
    assert len(calls) == 1
