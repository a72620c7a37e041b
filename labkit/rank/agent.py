"""The agent of a rank: a daemon thread with its own authenticated channel to the notebook.

It answers while the main thread is stuck in a collective: heartbeats, stacks, clock, and it frees the main thread.
"""

import os
import select
import threading
import time
from collections import deque
from typing import Any

from labkit.rank import calls, release, report
from labkit.rank.vitals import Vitals, main_stack
from labkit.wire import Channel, WireError, connect

BEAT_S = 0.25
FREE_TICK_S = 0.05
LAST_RESORT_AFTER = 30
# What a reader who stopped reading may hold up here; the oldest messages are dropped first, and counted.
MAX_QUEUED = 20_000


class Agent:
    """Owns the channel; everything that leaves the rank beside results goes through `queue`."""

    def __init__(self, channel: Channel, hello: dict[str, Any]) -> None:
        self._channel, self._hello = channel, hello
        self._queue: deque[dict[str, Any]] = deque(maxlen=MAX_QUEUED)
        self._num_dropped = 0
        self._num_tries = 0
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_write, False)
        os.set_blocking(self._wake_read, False)
        self._vitals = Vitals()
        self._number = 0

    def queue(self, topic: str, message: dict[str, Any]) -> None:
        """Queue a message from any thread; returns at once."""
        if len(self._queue) == MAX_QUEUED:
            self._num_dropped += 1
        self._queue.append({"topic": topic, "message": message})
        try:
            os.write(self._wake_write, b"x")
        except BlockingIOError:
            pass  # the agent is awake already

    def serve(self) -> None:
        """The agent's loop; ends when the notebook's end of the channel is gone (the keeper then ends the process)."""
        next_beat_s = 0.0
        watched: list[Channel | int] = [self._channel, self._wake_read]
        try:
            self._channel.send({"hello": {**self._hello, "thread": threading.get_native_id()}})
            while True:
                tick_s = FREE_TICK_S if calls.must_free() else BEAT_S
                ready, _, _ = select.select(watched, [], [], tick_s)
                if self._wake_read in ready:
                    os.read(self._wake_read, 4096)
                if self._channel in ready:
                    self._handle(self._channel.receive())
                while self._queue:
                    self._channel.send(self._queue.popleft())
                self._num_tries = self._num_tries + 1 if calls.must_free() else 0
                if self._num_tries:
                    _free(self._num_tries)
                if (now := time.monotonic()) >= next_beat_s:
                    next_beat_s = now + BEAT_S
                    self._channel.send({"beat": self._beat()})
        except WireError:
            return

    def _beat(self) -> dict[str, Any]:
        number, name, since_s = calls.running()
        if number != self._number:
            self._number = number
            self._vitals.began()
        self._vitals.look()
        return {
            "number": number,
            "name": name,
            "running_s": time.monotonic() - since_s if number else 0.0,
            "waiting_s": self._vitals.waiting_s if number else 0.0,
            "memory_bytes": self._vitals.memory_bytes(),
            "num_dropped": self._num_dropped,
        }

    def _handle(self, request: dict[str, Any]) -> None:
        match request.get("do"):
            case "free":
                calls.interrupt_upto(int(request["upto"]))
            case "stop":
                report.request_stop()
            case "clock":
                self._channel.send({"re": request["id"], "clock_s": time.monotonic()})
            case "look":
                self._channel.send({"re": request["id"], "stack": main_stack(), **self._beat()})


def _free(num_tries: int) -> None:
    """One try at ending what the main thread waits for; the loop comes again until it is idle.

    The first only interrupts: a collective that is just being posted must have begun to wait before its sockets go, or
    gloo may not notice that they went.
    """
    with calls.freeing:
        if not calls.must_free():
            return
        if num_tries > 1:
            release.shut(waited_on=True, everything=num_tries % LAST_RESORT_AFTER == 0)
        calls.poke()


def start(host: str, port: int, key: bytes, hello: dict[str, Any]) -> Agent:
    """Connect to the notebook's hub, say who this is, and serve from a daemon thread."""
    agent = Agent(connect(host, port, key), {**hello, "pid": os.getpid(), "host": os.uname().nodename})
    report.install(agent.queue)
    threading.Thread(target=agent.serve, name="labkit-agent", daemon=True).start()
    return agent
