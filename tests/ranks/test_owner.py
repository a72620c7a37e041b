"""However the owner of ranks ends, nothing of them outlives it."""

import os
import signal
import subprocess
import sys
import time
import uuid

import psutil
import pytest

from tests import shared_memory

pytestmark = pytest.mark.ranks

TIMEOUT_S = 60.0
START = """
import os, sys, time
import labkit as lk
print("begun", flush=True)
ranks = lk.cluster.start(2, spares=1)
def hang():
    import subprocess, torch.distributed as dist
    subprocess.Popen(["sleep", "3600"])
    if dist.get_rank() == 0:
        dist.barrier()
    return 7
call = ranks.run(hang, block=False)
while ranks.status()[0].state not in ("running", "waiting"):
    time.sleep(0.02)
time.sleep(0.2)
print("hangs", flush=True)
"""


class Owner:
    """A program that starts ranks, with everything that it starts known by a mark in the environment."""

    def __init__(self, folder, then: str, code: str = START) -> None:
        self.mark = uuid.uuid4().hex
        self.folder = folder
        environment = {**os.environ, "LABKIT_TEST_MARK": self.mark, "TMPDIR": str(folder)}
        self.files = shared_memory.files()
        self.process = subprocess.Popen(
            [sys.executable, "-c", code + then],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=folder,
        )

    def until(self, word: str) -> None:
        assert self.process.stdout is not None
        said = []
        for line in self.process.stdout:
            said.append(line)
            if line.strip() == word:
                return
        pytest.fail(f"it never said {word}: {''.join(said)}")

    def processes(self) -> list[psutil.Process]:
        """Everything that carries the mark; zombies of others do not count."""
        found = []
        for process in psutil.process_iter():
            try:
                alive = process.status() != psutil.STATUS_ZOMBIE
                if alive and process.environ().get("LABKIT_TEST_MARK") == self.mark:
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def assert_all_gone(self, but: tuple[int, ...] = ()) -> None:
        began_s = time.monotonic()
        while left := [one for one in self.processes() if one.pid not in but]:
            assert time.monotonic() < began_s + TIMEOUT_S, f"still there: {left}"
            time.sleep(0.02)
        print(f"all gone {time.monotonic() - began_s:.2f} s after its end")
        folders = [name for name in os.listdir(self.folder) if name.startswith("labkit-")]
        while [name for name in os.listdir(self.folder) if name.startswith("labkit-")]:
            assert time.monotonic() < began_s + TIMEOUT_S, f"folders stay: {folders}"
            time.sleep(0.02)
        assert not shared_memory.left_since(self.files)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()


def test_killed_while_ranks_hang(tmp_path) -> None:
    owner = Owner(tmp_path, "time.sleep(3600)")
    owner.until("hangs")
    pids = {one.pid for one in owner.processes()}
    assert len(pids) >= 10  # two of `sleep`, owner, keeper, controller (2), store, 2 ranks, spare
    owner.end()
    owner.assert_all_gone()


@pytest.mark.parametrize("delay_s", [0.0, 0.05, 0.2, 0.5, 1.0, 2.0])
def test_killed_while_starting(tmp_path, delay_s: float) -> None:
    owner = Owner(tmp_path, "")
    owner.until("begun")
    time.sleep(delay_s)
    owner.end()
    owner.assert_all_gone()


@pytest.mark.parametrize("ending", ["", "os._exit(3)", "raise ValueError('uncaught')"])
def test_owner_ends_by_itself(tmp_path, ending: str) -> None:
    owner = Owner(tmp_path, ending)
    owner.until("hangs")
    owner.process.wait(TIMEOUT_S)
    owner.assert_all_gone()
    owner.end()


def test_a_fork_of_the_owner_does_not_keep_the_ranks(tmp_path) -> None:
    then = "pid = os.fork()\nif pid == 0:\n    time.sleep(3600)\nprint(pid, flush=True)\ntime.sleep(3600)\n"
    owner = Owner(tmp_path, then)
    owner.until("hangs")
    assert owner.process.stdout is not None
    child = int(owner.process.stdout.readline())
    try:
        owner.end()
        owner.assert_all_gone(but=(child,))
        assert psutil.pid_exists(child)
    finally:
        os.kill(child, signal.SIGKILL)
    owner.assert_all_gone()


def test_forgotten_ranks_end(tmp_path) -> None:
    then = "del ranks, call\nimport gc\ngc.collect()\nprint('forgotten', flush=True)\ntime.sleep(3600)\n"
    owner = Owner(tmp_path, then)
    owner.until("forgotten")
    owner.assert_all_gone(but=(owner.process.pid,))
    owner.end()


def test_jupyter_kernel_restarted_and_killed(tmp_path, monkeypatch) -> None:
    from jupyter_client.manager import KernelManager

    watch = Owner(tmp_path, "", "")
    watch.process.wait(TIMEOUT_S)
    kernel = KernelManager(kernel_name="python3")
    environment = {**os.environ, "LABKIT_TEST_MARK": watch.mark, "TMPDIR": str(tmp_path)}
    kernel.start_kernel(env=environment, cwd=str(tmp_path))
    client = kernel.client()
    client.start_channels()
    try:
        for end in (lambda: kernel.restart_kernel(now=True), lambda: kernel.shutdown_kernel(now=True)):
            client.wait_for_ready(timeout=TIMEOUT_S)
            reply = client.execute_interactive(START, timeout=TIMEOUT_S * 2, output_hook=lambda message: None)
            assert reply["content"]["status"] == "ok", reply["content"]
            old = watch.processes()
            assert len(old) >= 8
            end()
            deadline = time.monotonic() + TIMEOUT_S
            while any(one.is_running() and one.status() != psutil.STATUS_ZOMBIE for one in old):
                assert time.monotonic() < deadline, [one for one in old if one.is_running()]
                time.sleep(0.05)
    finally:
        client.stop_channels()
        if kernel.has_kernel:
            kernel.shutdown_kernel(now=True)
        kernel.cleanup_resources()
        watch.end()
    watch.assert_all_gone()
