"""The notebook's end of the agents: one listening socket, one connection per rank; no stuck rank can block it."""

import contextlib
import itertools
import logging
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from labkit.wire import Channel, WireError, accept

JOIN_TIMEOUT_S = 10.0
CLOCK_ROUNDS = 5
MAX_ANSWERS = 1000

_log = logging.getLogger(__name__)

Subscriber = Callable[[int, dict[str, Any]], None]


class Hub:
    """Takes the agents' connections, keeps their last heartbeats, passes their messages to subscribers."""

    def __init__(self, key: bytes, host: str = "127.0.0.1") -> None:
        self._key = key
        self._listener = socket.create_server((host, 0))
        self.host, self.port = self._listener.getsockname()[:2]
        self._ids = itertools.count(1)
        self._changed = threading.Condition()
        self._channels: dict[int, Channel] = {}
        self._hellos: dict[int, dict[str, Any]] = {}
        self._beats: dict[int, tuple[float, dict[str, Any]]] = {}
        self._answers: dict[int, tuple[float, dict[str, Any]]] = {}
        self._subscribers: dict[int, tuple[str, Subscriber]] = {}
        self._threads: list[threading.Thread] = []
        self._open: set[Channel] = set()
        self._closed = False
        self._start(self._accept)

    def wait_for(self, uuids: dict[int, str], timeout_s: float) -> list[int]:
        """Wait until the agent of each rank said hello with the uuid of its seat; returns the ranks that did not."""

        def missing() -> list[int]:
            return [rank for rank, uuid in uuids.items() if self._hellos.get(rank, {}).get("uuid") != uuid]

        with self._changed:
            self._changed.wait_for(lambda: not missing() or self._closed, timeout_s)
            return missing()

    def hello(self, rank: int) -> dict[str, Any]:
        """What the agent of a rank said first: pid, host."""
        return self._hellos.get(rank, {})

    def beat(self, rank: int) -> tuple[float, dict[str, Any]]:
        """Seconds since the last heartbeat of a rank, and what it said (infinite and empty before the first)."""
        with self._changed:
            seen_s, beat = self._beats.get(rank, (float("-inf"), {}))
        return time.monotonic() - seen_s, beat

    def send(self, rank: int, do: str, **fields: Any) -> int:
        """Ask something of a rank's agent; returns the number under which an answer will come (0: it is gone)."""
        number = next(self._ids)
        channel = self._channels.get(rank)
        if channel is None:
            return 0
        try:
            channel.send({"do": do, "id": number, **fields})
        except WireError:
            return 0
        return number

    def answer(self, number: int, timeout_s: float) -> tuple[float, dict[str, Any]] | None:
        """Wait for an answer: (monotonic seconds when it came, the answer), or None."""
        with self._changed:
            self._changed.wait_for(lambda: number in self._answers or self._closed, timeout_s if number else 0)
            return self._answers.pop(number, None)

    def ask(self, ranks: list[int], do: str, timeout_s: float) -> dict[int, dict[str, Any]]:
        """Ask several agents at once; ranks that do not answer in time are not in the result."""
        numbers = {rank: self.send(rank, do) for rank in ranks}
        deadline = time.monotonic() + timeout_s
        answers = {}
        for rank, number in numbers.items():
            reply = self.answer(number, max(0.0, deadline - time.monotonic()))
            if reply is not None:
                answers[rank] = reply[1]
        return answers

    def clock_offset(self, rank: int, timeout_s: float = 2.0) -> float | None:
        """Seconds to add to a rank's monotonic clock to get this process's; from the quickest of a few round trips."""
        best: tuple[float, float] | None = None
        for _ in range(CLOCK_ROUNDS):
            sent_s = time.monotonic()
            reply = self.answer(self.send(rank, "clock"), timeout_s)
            if reply is None:
                return None
            came_s, answer = reply
            trip_s = came_s - sent_s
            if best is None or trip_s < best[0]:
                best = (trip_s, (sent_s + came_s) / 2 - float(answer["clock_s"]))
        return best[1] if best else None

    def subscribe(self, topic: str, subscriber: Subscriber) -> Callable[[], None]:
        """Have `subscriber(rank, message)` called for each message of a topic, on the rank's reader thread."""
        number = next(self._ids)
        with self._changed:
            self._subscribers[number] = (topic, subscriber)

        def unsubscribe() -> None:
            with self._changed:
                self._subscribers.pop(number, None)

        return unsubscribe

    def forget(self, rank: int) -> None:
        """Drop what is known of a rank whose process ended."""
        with self._changed:
            channel = self._channels.pop(rank, None)
            self._hellos.pop(rank, None)
            self._beats.pop(rank, None)
        if channel is not None:
            channel.close()

    def close(self) -> None:
        """End every connection and thread."""
        with self._changed:
            self._closed = True
            channels = list(self._open)
            self._subscribers.clear()
            self._changed.notify_all()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for channel in channels:
            channel.close()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(JOIN_TIMEOUT_S)

    def _start(self, target: Callable[..., None], *args: Any) -> None:
        thread = threading.Thread(target=target, args=args, name="labkit-hub", daemon=True)
        self._threads = [one for one in self._threads if one.is_alive()] + [thread]
        thread.start()

    def _accept(self) -> None:
        while not self._closed:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            self._start(self._serve, sock)

    def _serve(self, sock: socket.socket) -> None:
        """One connection: a stranger is dropped, an agent is read until it ends."""
        try:
            channel = accept(sock, self._key)
        except WireError:
            return
        with self._changed:
            if self._closed:
                channel.close()
                return
            self._open.add(channel)
        try:
            sock.settimeout(JOIN_TIMEOUT_S)  # a stranger may know how to begin, and then say nothing
            hello = channel.receive()["hello"]
            sock.settimeout(None)
            self._enter(int(hello["rank"]), channel, hello)
            while True:
                self._take(int(hello["rank"]), channel.receive())
        except (WireError, KeyError, ValueError, TypeError):
            pass
        finally:
            channel.close()
            with self._changed:
                self._open.discard(channel)

    def _enter(self, rank: int, channel: Channel, hello: dict[str, Any]) -> None:
        with self._changed:
            self._channels[rank] = channel
            self._hellos[rank] = hello
            self._beats[rank] = (time.monotonic(), {})
            self._changed.notify_all()

    def _take(self, rank: int, message: dict[str, Any]) -> None:
        now = time.monotonic()
        if "topic" in message:
            for topic, subscriber in list(self._subscribers.values()):
                if topic == message["topic"]:
                    _tell(subscriber, rank, message["message"])
            return
        with self._changed:
            if "beat" in message:
                self._beats[rank] = (now, message["beat"])
            elif "re" in message:
                self._answers[message["re"]] = (now, message)
                while len(self._answers) > MAX_ANSWERS:  # nobody waits any more for the oldest
                    del self._answers[next(iter(self._answers))]
                self._changed.notify_all()


def _tell(subscriber: Subscriber, rank: int, message: dict[str, Any]) -> None:
    """A subscriber's own fault must not cost the rank its connection."""
    try:
        subscriber(rank, message)
    except Exception:
        _log.exception("a subscriber failed on a message of rank %d", rank)
