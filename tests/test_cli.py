"""The command line, and JupyterLab as it starts it."""

import json
import os
import pathlib
import re
import signal
import socket
import stat
import subprocess
import sys
import time
import urllib.error
import urllib.request

import pytest

from labkit import __version__, cli, commands, doctor_facts, notebook_server
from labkit.errors import LabError

GENEROUS_S = 120


def test_version(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"labkit {__version__}\n"


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["brew"],
        ["doctor", "--ranks", "0"],
        ["doctor", "--ranks", "x"],
        ["exercises"],
        ["grade"],
        ["grade", "class"],
        ["grade", "class", "--out", "report", "--jobs", "0"],
        ["grade", "class", "--out", "report", "--timeout", "nan"],
        ["grade", "class", "--out", "report", "--timeout", "-1"],
        ["grade", "class", "--out", "report", "--questions", ","],
    ],
)
def test_wrong_usage_exits_with_2(arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code == 2
    assert "usage: labkit" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "environment", "port", "browser"),
    [
        ([], {}, None, True),
        ([], {"PORT": "9001"}, "9001", True),
        (["--port", "9002"], {"PORT": "9001"}, "9002", True),
        ([], {"PORT": "", "NO_BROWSER": ""}, None, True),
        ([], {"NO_BROWSER": "0"}, None, True),
        ([], {"NO_BROWSER": "1"}, None, False),
        (["--no-browser"], {}, None, False),
    ],
)
def test_lab_takes_port_and_browser_from_options_or_environment(monkeypatch, arguments, environment, port, browser):
    asked = []
    monkeypatch.setattr(commands, "lab", lambda **options: asked.append(options) or 0)
    assert cli.main(["lab", *arguments], environment) == 0
    assert asked == [{"port": port, "browser": browser}]


def test_grade_hands_its_options_on(monkeypatch):
    asked = []
    monkeypatch.setattr(commands, "grade", lambda **options: asked.append(options) or 0)
    assert cli.main(["grade", "class", "--out", "report"], {}) == 0
    many = ["--jobs", "2", "--questions", "06.1, 06.2", "--seed", "7", "--no-sandbox", "--timeout", "2.5"]
    assert cli.main(["grade", "class", "--out", "report", *many], {}) == 0
    paths = {"submissions": pathlib.Path("class"), "out": pathlib.Path("report")}
    usual = {"jobs": 1, "questions": None, "seed": 0, "no_sandbox": False, "timeout_s": None}
    named = {"jobs": 2, "questions": ["06.1", "06.2"], "seed": 7, "no_sandbox": True, "timeout_s": 2.5}
    assert asked == [{**paths, **usual}, {**paths, **named}]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere"], "nowhere is no folder"),
        (["."], "holds no submission"),
        ([".", "--questions", "13.1"], "there is no question '13.1'"),
    ],
)
def test_grade_says_in_one_line_what_is_wrong(tmp_path, monkeypatch, capsys, arguments, said):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["grade", *arguments, "--out", str(tmp_path.parent / "report")], {}) == 1
    error = capsys.readouterr().err
    assert error.startswith("labkit: ")
    assert said in error
    assert error.count("\n") == 1


def test_exercises_are_built_and_compared(tmp_path, capsys):
    (tmp_path / "solutions").mkdir()
    source = "def f():\n    ### BEGIN SOLUTION\n    return 1\n    ### END SOLUTION"
    cell = {"cell_type": "code", "id": "q06-1", "metadata": {}, "source": source}
    (tmp_path / "solutions" / "06_a.ipynb").write_text(json.dumps({"cells": [cell]}))
    build = ["exercises", "build", "--folder", str(tmp_path)]
    assert cli.main([*build, "--check"], {}) == 1
    assert capsys.readouterr().out == f"{tmp_path}/exercises/06_a.ipynb: missing\n"
    assert cli.main(build, {}) == 0
    assert capsys.readouterr().out == f"{tmp_path}/exercises/06_a.ipynb: missing, now written\n"
    assert cli.main([*build, "--check"], {}) == 0
    (tmp_path / "solutions" / "06_a.ipynb").write_text("{")
    assert cli.main(build, {}) == 1
    assert "06_a.ipynb: this is not JSON" in capsys.readouterr().err


def test_the_command_line_loads_nothing_heavy(repository):
    code = "import json, sys\nimport labkit.cli\nprint(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=repository, capture_output=True, text=True, timeout=240)
    loaded = json.loads(done.stdout)
    assert not {"IPython", "ipyparallel", "numpy", "plotly", "torch"} & set(loaded)


@pytest.mark.parametrize("port", ["0", "65536", "-1", "eight", "8888.0", "٣", "1e3"])
def test_an_impossible_port_gets_one_line(port, capsys):
    assert cli.main(["lab"], {"PORT": port}) == 1
    said = capsys.readouterr().err
    assert said.startswith("labkit: PORT=")
    assert "from 1 to 65535" in said
    assert said.count("\n") == 1


def test_a_taken_port_gets_one_line(capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert cli.main(["lab"], {"PORT": str(port)}) == 1
        assert f"Port {port} is in use" in capsys.readouterr().err
        assert notebook_server.choose_port(None, first=port) > port


def test_no_free_port_at_all_gets_one_line(monkeypatch):
    monkeypatch.setattr(notebook_server, "_is_free", lambda port: False)
    with pytest.raises(LabError, match="Ports 8888 to 8937 are all in use: choose a free one with PORT="):
        notebook_server.choose_port(None)


def test_interrupt_exits_with_130(monkeypatch):
    def interrupted(**_):
        raise KeyboardInterrupt

    monkeypatch.setattr(commands, "lab", interrupted)
    assert cli.main(["lab"], {}) == 130


def test_root_is_allowed_only_for_root():
    options = {"port": 8888, "folder": pathlib.Path("here"), "page": "/lab"}
    assert "--allow-root" in notebook_server.server_options(**options, as_root=True)
    assert "--allow-root" not in notebook_server.server_options(**options, as_root=False)
    assert "--ServerApp.ip=127.0.0.1" in notebook_server.server_options(**options, as_root=False)


def test_news_question_is_off_and_other_settings_stay(tmp_path):
    path = tmp_path / "share" / "jupyter" / "lab" / "settings" / "overrides.json"
    path.parent.mkdir(parents=True)
    path.write_text('{"other": {"kept": true}}')
    notebook_server.quiet_settings(tmp_path)
    notebook_server.quiet_settings(tmp_path)
    settings = json.loads(path.read_text())
    assert settings["other"] == {"kept": True}
    assert settings["@jupyterlab/apputils-extension:notification"]["fetchNews"] == "false"
    path.write_text("{broken")
    notebook_server.quiet_settings(tmp_path)
    assert "@jupyterlab/apputils-extension:notification" in json.loads(path.read_text())


def test_token_file_is_private_and_goes_away():
    with notebook_server._token_file() as (token, path):
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
        assert pathlib.Path(path).read_text() == token
        assert len(token) >= 40
    assert not os.path.exists(path)


@pytest.mark.parametrize("as_json", [False, True])
def test_doctor_says_what_blocks_and_exits_with_1(monkeypatch, capsys, as_json):
    facts = doctor_facts.gather()
    monkeypatch.setattr(doctor_facts, "_loopback_port_opens", lambda: False)
    monkeypatch.setattr(doctor_facts, "_torch", lambda: facts.torch)
    assert cli.main(["doctor", "--json"] if as_json else ["doctor"], {}) == 1
    said = capsys.readouterr().out
    if as_json:
        report = json.loads(said)
        assert report["facts"]["num_free_ports"] == 0
        ports = next(one for one in report["findings"] if one["topic"] == "ports")
        assert ports["level"] == "blocks"
        assert ports["next_step"]
    else:
        assert "no port on 127.0.0.1 can be used" in said
        assert "will not run before this is put right" in said


@pytest.fixture
def lab(tmp_path, repository):
    """`labkit lab` as a process of its own, with Jupyter's folders in a temporary place."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    folders = {f"JUPYTER_{kind}_DIR": str(tmp_path / kind) for kind in ("CONFIG", "DATA", "RUNTIME")}
    environment = {**os.environ, **folders, "PORT": str(port), "NO_BROWSER": "1", "TMPDIR": str(tmp_path)}
    output = tmp_path / "output.txt"
    with output.open("w") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "labkit", "lab"],
            cwd=repository,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield process, port, output
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()


def wait_for_address(process, output):
    deadline_s = time.monotonic() + GENEROUS_S
    while time.monotonic() < deadline_s:
        if match := re.search(r"http://127\.0\.0\.1:\d+/\S+\?token=(\w+)", output.read_text()):
            return match[0], match[1]
        assert process.poll() is None, output.read_text()
        time.sleep(0.1)
    raise AssertionError(f"no address in {GENEROUS_S} s:\n{output.read_text()}")


def status_of(address, token=None):
    headers = {"Authorization": f"token {token}"} if token else {}
    try:
        with urllib.request.urlopen(urllib.request.Request(address, headers=headers), timeout=30) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        error.close()
        return error.code


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_lab_serves_with_a_token_and_ends_cleanly(lab, tmp_path, repository, ending):
    process, port, output = lab
    address, token = wait_for_address(process, output)
    assert address.startswith(f"http://127.0.0.1:{port}/lab")
    if (repository / "notebooks" / "00_start.ipynb").exists():
        assert address.startswith(f"http://127.0.0.1:{port}/lab/tree/notebooks/00_start.ipynb?token=")
    assert status_of(f"http://127.0.0.1:{port}/api/kernels") == 403
    assert status_of(f"http://127.0.0.1:{port}/api/kernels", token) == 200
    command_line = pathlib.Path(f"/proc/{process.pid}/cmdline")
    if command_line.exists():
        assert token.encode() not in command_line.read_bytes()
        assert token.encode() not in pathlib.Path(f"/proc/{process.pid}/environ").read_bytes()
    process.send_signal(ending)
    assert process.wait(timeout=GENEROUS_S) == 0
    said = output.read_text()
    assert "Traceback" not in said
    assert not list(tmp_path.glob("labkit-token-*"))
