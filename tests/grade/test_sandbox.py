"""What a program in the sandbox can reach, and that nothing of it is left; no ranks are needed to see that."""

import contextlib
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest

from labkit.errors import LabError
from labkit.grade import sandbox
from labkit.grade.sandbox import SHM_BYTES, TMP_BYTES, Box, Sandbox

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
GONE_TIMEOUT_S = 60.0
SECRET = "a-secret-of-the-grader"

pytestmark = pytest.mark.usefixtures("nothing_left")
needs_sandbox = pytest.mark.sandbox


def said(where: Sandbox, code: str, *arguments: str) -> str:
    """What a Python program prints in a sandbox."""
    with where.run([sys.executable, "-c", code, *arguments], b"") as box:
        assert box.wait(GONE_TIMEOUT_S) == 0, box.complaint()
        return os.read(box.out, 1 << 16).decode()


def first_line(box: Box) -> str:
    return os.read(box.out, 100).decode().strip()


PROBE = """
import json, os, socket, subprocess, sys
places, ports, grader = json.loads(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3]

def listed(path):
    try:
        return sorted(os.listdir(path)) if os.path.isdir(path) else open(path).read(100)
    except OSError as error:
        return type(error).__name__

def written(folder):
    try:
        open(os.path.join(folder, "made"), "w").close()
        return True
    except OSError:
        return False

def connects(address):
    try:
        socket.create_connection(address, 3).close()
        return True
    except OSError:
        return False

with open("/proc/self/status") as status:
    facts = {line.partition(":")[0]: line.partition(":")[2].strip() for line in status}
unmask = subprocess.run(
    ["/usr/bin/unshare", "-Urm", "sh", "-c", f"umount {places[0]}; ls {places[0]}"], capture_output=True, text=True
)
print(json.dumps({
    "places": [listed(one) for one in places],
    "unmasked": unmask.stdout,
    "written": [one for one in ("/", "/usr", "/dev", "/proc/sys/kernel", "/home", sys.prefix, places[1], "/etc")
                if written(one)],
    "tmp": [written(one) for one in ("/tmp", "/dev/shm")],
    "sizes": [os.statvfs(one).f_blocks * os.statvfs(one).f_frsize for one in ("/tmp", "/dev/shm")],
    "connected": [one for one in ports if connects(tuple(one))],
    "interfaces": [name for _, name in socket.if_nameindex()],
    "environment": dict(os.environ),
    "ids": [os.getuid(), os.geteuid(), os.getgid(), os.getgroups()],
    "capabilities": [facts[one] for one in ("CapEff", "CapPrm", "CapBnd", "CapInh")],
    "no_new_privs": facts["NoNewPrivs"],
    "processes": [int(one) for one in os.listdir("/proc") if one.isdigit()],
    "grader": listed(f"/proc/{grader}/environ"),
    "top": os.listdir("/"),
    "host": socket.gethostbyname(socket.gethostname()),
}))
"""


@pytest.fixture(scope="module")
def inside(chosen: Sandbox, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict]:
    """What a program sees that looks around with all its might."""
    other = tmp_path_factory.mktemp("submissions") / "s02.ipynb"
    other.write_text("the answer of somebody else")
    package = REPOSITORY / "labkit"
    places = [package / "checks", package, REPOSITORY / "solutions", REPOSITORY / "tests", REPOSITORY / ".git", other]
    with pytest.MonkeyPatch.context() as patch, socket.create_server(("", 0)) as listener:
        patch.setenv("LABKIT_SECRET", SECRET)
        port = listener.getsockname()[1]
        hosts = ["127.0.0.1", socket.gethostbyname(socket.gethostname())]
        hosts += [
            one.address for ones in psutil.net_if_addrs().values() for one in ones if one.family == socket.AF_INET
        ]
        arguments = json.dumps([str(one) for one in places]), json.dumps([[one, port] for one in hosts])
        yield json.loads(said(chosen, PROBE, *arguments, str(os.getpid())))


@needs_sandbox
def test_answers_cannot_be_read_off_the_disk(inside: dict) -> None:
    checks, package, *others = inside["places"]
    assert checks == []
    assert inside["unmasked"] == ""
    assert "trial" in package
    assert others == ["FileNotFoundError"] * 4


@needs_sandbox
def test_only_what_is_listed_is_there(inside: dict) -> None:
    python = {pathlib.Path(one).parts[1] for one in (sys.prefix, sys.base_prefix, str(REPOSITORY))}
    system = {"usr", "bin", "sbin", "lib", "lib32", "lib64", "etc", "proc", "dev", "tmp"}
    assert set(inside["top"]) <= system | python
    assert inside["host"] == "127.0.0.1"


@needs_sandbox
def test_nothing_can_be_written_but_a_small_tmp(inside: dict) -> None:
    assert inside["written"] == []
    assert inside["tmp"] == [True, True]
    assert inside["sizes"] == [TMP_BYTES, SHM_BYTES]


@needs_sandbox
def test_there_is_no_network_and_no_way_to_the_grader_s(inside: dict) -> None:
    assert inside["connected"] == []
    assert inside["interfaces"] == ["lo"]


@needs_sandbox
def test_the_grader_s_processes_and_environment_are_out_of_sight(inside: dict) -> None:
    assert SECRET not in json.dumps(inside)
    assert inside["grader"] == "FileNotFoundError"
    assert len(inside["processes"]) <= 3
    assert "LABKIT_SECRET" not in inside["environment"]


@needs_sandbox
def test_the_program_has_no_rights(inside: dict) -> None:
    uid, effective, gid, groups = inside["ids"]
    assert uid == effective == gid
    assert uid not in (0, os.getuid())
    assert set(groups) <= {uid}
    effective_caps, permitted, bounding, inheritable = (int(one, 16) for one in inside["capabilities"])
    assert (effective_caps, permitted, inheritable) == (0, 0, 0)
    assert inside["no_new_privs"] == "1"
    if os.geteuid() == 0:
        assert bounding == 0


@needs_sandbox
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become several users")
def test_two_boxes_at_once_belong_to_different_users(chosen: Sandbox) -> None:
    program = [sys.executable, "-c", "import os, time; print(os.getuid(), flush=True); time.sleep(600)"]
    with chosen.run(program, b"") as one, chosen.run(program, b"") as other:
        uids = first_line(one), first_line(other)
        real = [{str(process.uids().real) for process in box.processes()} - {"0"} for box in (one, other)]
    assert uids[0] != uids[1]
    assert real == [{uids[0]}, {uids[1]}]


STUBBORN = """
import os, signal, time
for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
    signal.signal(number, signal.SIG_IGN)
for _ in range(3):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            time.sleep(600)
        os._exit(0)
time.sleep(0.3)
print("up", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("kind", [pytest.param("bubblewrap", marks=needs_sandbox), "none"])
def test_daemons_of_daemons_end_with_the_box(kind: str) -> None:
    where = sandbox.choose(no_sandbox=kind == "none")
    with where.run([sys.executable, "-c", STUBBORN], b"") as box:
        assert first_line(box) == "up"
        running = box.processes()
    assert len(running) >= 4
    assert not any(one.is_running() for one in running)


def test_without_a_sandbox_what_kills_its_warden_ends_too() -> None:
    code = STUBBORN.replace("time.sleep(600)", "os.kill(os.getppid(), 9); time.sleep(600)", 1)
    where = sandbox.choose(no_sandbox=True)
    with where.run([sys.executable, "-c", code], b"") as box, contextlib.suppress(subprocess.TimeoutExpired):
        box.wait(5.0)
    assert not any(code in cmdline(one) for one in psutil.process_iter())


def cmdline(process: psutil.Process) -> list[str]:
    with contextlib.suppress(psutil.Error):
        return process.cmdline()
    return []


@pytest.mark.parametrize("kind", [pytest.param("bubblewrap", marks=needs_sandbox), "none"])
def test_a_box_ends_with_a_grader_that_is_killed(kind: str) -> None:
    grader = f"""
import os, sys, time
from labkit.grade import sandbox
with sandbox.choose({kind == "none"}).run([sys.executable, "-c", {STUBBORN!r}], b"") as box:
    os.read(box.out, 10)
    print(*[one.pid for one in box.processes()], flush=True)
    time.sleep(600)
"""
    with subprocess.Popen([sys.executable, "-c", grader], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        running = [psutil.Process(int(one)) for one in process.stdout.readline().split()]
        process.send_signal(signal.SIGKILL)
    assert len(running) >= 4
    _, left = psutil.wait_procs(running, GONE_TIMEOUT_S)
    assert left == []


def test_a_machine_without_bubblewrap_is_told_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(LabError, match=r"bubblewrap is not on this machine.*apt-get install bubblewrap.*--no-sandbox"):
        sandbox.choose()


def test_a_bubblewrap_that_may_not_work_is_found_out(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    program = tmp_path / "bwrap"
    program.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(LabError, match=r"cannot run a program .*No permissions to create new namespace.*--no-sandbox"):
        sandbox.choose()


def test_without_a_sandbox_the_words_say_what_is_in_reach() -> None:
    where = sandbox.choose(no_sandbox=True)
    assert "nothing kept them from your files" in where.words
    assert said(where, "import os; print(os.getuid(), os.environ.get('LABKIT_SECRET'))") == f"{os.getuid()} None\n"
