"""Where answers run that nobody has looked at: bubblewrap's namespaces, or, where that is refused, nothing."""

import contextlib
import os
import secrets
import shutil
import site
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import IO

import psutil

import labkit
from labkit.errors import LabError

__all__ = ["Box", "Sandbox", "choose"]

# Ranks of a question under root get a user of their own, so that processes are counted apart: one of these numbers,
# which no account has (Debian keeps 60000 to 64999 for packages, and hands out none above 64000 by itself).
FIRST_UID = 64_001
NOBODY = 65_534
TMP_BYTES = 512 << 20
SHM_BYTES = 512 << 20
TRY_TIMEOUT_S = 60.0
END_TIMEOUT_S = 20.0
MAX_STDERR = 4_000
# What a process of a question without a sandbox carries in its environment.
MARK = "LABKIT_BOX"

_INSTALL = (
    "Install it (apt-get install bubblewrap; 0.8 or newer), or say --no-sandbox: answers then run as you, with your "
    "files, your network and the hidden checks in reach."
)


class Box:
    """One program that runs in the sandbox, with everything that it started.

    Attributes:
        out: the descriptor of its stdout.
        into: the descriptor of its stdin.
        unsent: what was told to it and has not found room in the pipe; it may never read.
    """

    def __init__(self, process: subprocess.Popen[bytes], stderr: IO[bytes], mark: str) -> None:
        self._process, self._stderr, self._mark = process, stderr, mark
        self._seen: set[psutil.Process] = set()
        if process.stdout is None or process.stdin is None:
            raise TypeError("a box needs its program's stdin and stdout as pipes")
        self.out, self.into = process.stdout.fileno(), process.stdin.fileno()
        self.unsent = bytearray()
        os.set_blocking(self.into, False)

    def tell(self, data: bytes = b"") -> None:
        """Put data on its stdin, as far as there is room; never waits. Call it again while some is `unsent`."""
        self.unsent += data
        try:
            while self.unsent:
                del self.unsent[: os.write(self.into, self.unsent)]
        except BlockingIOError:
            pass
        except BrokenPipeError:  # it has ended, or has closed its stdin: its stdout will tell
            self.unsent.clear()

    def processes(self) -> list[psutil.Process]:
        """Everything that runs in it."""
        try:
            found = psutil.Process(self._process.pid).children(recursive=True)
        except psutil.Error:
            return []
        if self._mark:
            self._seen.update(found)
        return found

    def wait(self, timeout_s: float) -> int:
        """Wait until the program has ended; returns its exit code.

        Raises:
            subprocess.TimeoutExpired: it has not, in that time.
        """
        return self._process.wait(timeout_s)

    def complaint(self) -> str:
        """The end of what the program wrote to stderr."""
        self._stderr.seek(max(0, self._stderr.seek(0, os.SEEK_END) - MAX_STDERR))
        return self._stderr.read().decode("utf-8", "replace").strip()

    def end(self) -> None:
        """End everything in it; returns when it is gone."""
        inside = self.processes()
        if self._mark:
            self._process.terminate()  # the warden ends what it stands over
        else:
            # The first process of the PID namespace: the kernel takes the others along, and bubblewrap reaps it.
            with contextlib.suppress(psutil.Error):
                for first in psutil.Process(self._process.pid).children():
                    first.kill()
        try:
            self._process.wait(END_TIMEOUT_S if inside else 1.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._mark:
            self._end_strays()
        psutil.wait_procs(inside, END_TIMEOUT_S)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        self._stderr.close()

    def _end_strays(self) -> None:
        """End what is left where the warden was killed: by its mark, or because it was seen below the warden."""
        while strays := {one for one in {*self._seen, *_marked(self._mark)} if _lives(one)}:
            for one in strays:
                with contextlib.suppress(psutil.Error):
                    one.kill()
            psutil.wait_procs(strays, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sandbox:
    """How answers are run.

    Attributes:
        program: bubblewrap's path; "" runs them without a sandbox.
        words: what this stops and what it does not.
    """

    program: str
    words: str

    @contextlib.contextmanager
    def run(self, argv: Sequence[str], stdin: bytes) -> Iterator[Box]:
        """Run a program in it, and begin to tell it `stdin`; all of it has ended when the block is left.

        Safe in several threads at once; what runs does not outlive the thread that is in the block.
        """
        with contextlib.ExitStack() as stack, tempfile.TemporaryFile() as stderr:
            if self.program:
                uid, home, mark = FIRST_UID + stack.enter_context(_PLACES.one()), "/tmp", ""
                command = [*_bubblewrap(self.program, uid), *argv]
            else:
                home = stack.enter_context(tempfile.TemporaryDirectory(prefix="labkit-", ignore_cleanup_errors=True))
                mark = secrets.token_hex(8)
                command = [sys.executable, "-m", "labkit.trial.warden", *argv]
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                cwd="/" if self.program else home,
                env=_environment(home, mark),
                start_new_session=True,
            )
            box = Box(process, stderr, mark)
            try:
                box.tell(stdin)
                yield box
            finally:
                box.end()

    def num_threads_beside(self) -> int:
        """Threads that the system may count together with those in the box, because they are the same user's."""
        if self.program and os.geteuid() == 0:
            return 0
        own = os.getuid()
        num_threads = 0
        for one in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                num_threads += one.num_threads() if one.uids().real == own else 0
        return num_threads


def choose(no_sandbox: bool = False) -> Sandbox:
    """The sandbox of this machine, after a program has run in it.

    Args:
        no_sandbox: whether to run answers without one.

    Raises:
        LabError: there is none that works; says what is missing and what to do.
    """
    if no_sandbox:
        return Sandbox(program="", words=_NONE)
    program = shutil.which("bwrap")
    if not program:
        raise LabError(f"bubblewrap is not on this machine: answers run behind it. {_INSTALL}")
    sandbox = Sandbox(program=program, words=_BUBBLEWRAP)
    said = _try(sandbox)
    if said != "works":
        why = said or "it said nothing"
        raise LabError(f"bubblewrap ({program}) cannot run a program on this machine ({why}). {_INSTALL}")
    return sandbox


def _try(sandbox: Sandbox) -> str:
    """Run Python with the lab in it: "works", or what it said instead."""
    code = "import os, labkit.trial; print('works' if os.getuid() else 'the program was still root')"
    with sandbox.run([sys.executable, "-c", code], b"") as box:
        try:
            box.wait(TRY_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return f"no answer within {TRY_TIMEOUT_S:g} s"
        return os.read(box.out, 1_000).decode("utf-8", "replace").strip() or box.complaint()


def _bubblewrap(program: str, uid: int) -> list[str]:
    """The command up to the program to run. Only what stands here is seen inside: whatever is new is hidden."""
    package = _package()
    system = ["--ro-bind", "/usr", "/usr", "--perms", "0755", "--dir", "/etc"]
    for name in ("ld.so.cache", "hosts", "nsswitch.conf"):  # the last two give its host name, localhost, an address
        system += ["--ro-bind-try", f"/etc/{name}", f"/etc/{name}"]
    for name in ("/bin", "/sbin", "/lib", "/lib32", "/lib64"):
        if os.path.islink(name):
            system += ["--symlink", os.readlink(name), name]
        elif os.path.isdir(name):
            system += ["--ro-bind", name, name]
    made: list[str] = []
    shown: list[str] = []
    for path in _outermost([*_python_folders(), package]):
        made += [part for parent in _parents(path) for part in ("--perms", "0755", "--dir", parent)]
        shown += ["--ro-bind", path, path]
    checks = os.path.join(package, "checks")  # hidden cases, and what is right
    return [
        *(program, *system, "--proc", "/proc", "--dev", "/dev"),
        *("--perms", "1777", "--size", str(SHM_BYTES), "--tmpfs", "/dev/shm", "--remount-ro", "/dev"),
        *("--perms", "1777", "--size", str(TMP_BYTES), "--tmpfs", "/tmp", *made, *shown),
        *("--perms", "0755", "--size", "4096", "--tmpfs", checks, "--remount-ro", checks),
        *("--remount-ro", "/", "--chdir", "/tmp"),
        *("--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--hostname", "localhost"),
        *("--die-with-parent", "--new-session"),
        *(_become_as_root(uid) if os.geteuid() == 0 else _become_as_user()),
    ]


def _become_as_root(uid: int) -> list[str]:
    """Under root: another user, for the kernel as well, with no way back."""
    caps = ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID", "--"]
    ids = ["/usr/bin/setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups", "--no-new-privs"]
    return [*caps, *ids, "--bounding-set=-all", "--inh-caps=-all"]


def _become_as_user() -> list[str]:
    """Under a normal user: nobody in a user namespace of its own, that is oneself without one's files."""
    return ["--unshare-user", "--uid", str(NOBODY), "--gid", str(NOBODY), "--"]


def _python_folders() -> list[str]:
    """The environment and the Python that it stands on."""
    real = os.path.dirname(os.path.dirname(os.path.realpath(sys.executable)))
    return [sys.prefix, sys.base_prefix, real, os.path.realpath(sys.prefix), os.path.realpath(sys.base_prefix)]


def _package() -> str:
    return os.path.dirname(os.path.abspath(labkit.__file__))


def _outermost(paths: Sequence[str]) -> list[str]:
    """The paths that lie in none of the others, nor in what is shown anyway."""
    chosen: list[str] = []
    for path in sorted(set(map(os.path.abspath, paths)), key=len):
        if not any(path == one or path.startswith(one + os.sep) for one in ("/usr", *chosen)):
            chosen.append(path)
    return chosen


def _parents(path: str) -> list[str]:
    """The folders above a path, outermost first, without the root."""
    parts = path.split(os.sep)[1:-1]
    return [os.sep + os.sep.join(parts[: end + 1]) for end in range(len(parts))]


def _environment(home: str, mark: str) -> dict[str, str]:
    """All that a program in the box knows of the grader's environment: nothing."""
    fixed = {"HOME": home, "TMPDIR": home, "PATH": "/usr/bin:/bin:/usr/sbin:/sbin", "LANG": "C.UTF-8"}
    named = {"USER": "learner", "LOGNAME": "learner", "PYTHONDONTWRITEBYTECODE": "1", "PYTHONNOUSERSITE": "1"}
    # A lab that is not installed there, but found through PYTHONPATH, is the one that answers are tried with.
    place = os.path.dirname(_package())
    beside = {} if place in site.getsitepackages() else {"PYTHONPATH": place}
    return {**fixed, **named, **beside, **({MARK: mark} if mark else {})}


def _marked(mark: str) -> Iterator[psutil.Process]:
    for one in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if one.environ().get(MARK) == mark:
                yield one


def _lives(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


class _Places:
    """Numbers from 0 that are in use, each by one box at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._taken: set[int] = set()

    @contextlib.contextmanager
    def one(self) -> Iterator[int]:
        """The smallest number that nobody uses."""
        with self._lock:
            number = next(one for one in range(len(self._taken) + 1) if one not in self._taken)
            self._taken.add(number)
        try:
            yield number
        finally:
            with self._lock:
                self._taken.discard(number)


_PLACES = _Places()
_BUBBLEWRAP = (
    "bubblewrap: answers ran without your rights, without network, out of sight of other processes, and saw of the "
    "disk only the system's programs, Python and the lab without its checks"
)
_NONE = (
    "none (--no-sandbox): answers ran as you; time, memory and processes were limited, but nothing kept them from your "
    "files, the hidden checks, other submissions, the network, or from ending other processes of yours"
)
