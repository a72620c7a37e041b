"""The hub takes agents that know the key, and is not disturbed by anybody else."""

import contextlib
import socket
import struct
import threading
import time

import pytest

from labkit.cluster.hub import Hub
from labkit.wire import WireError, channel, connect

KEY = b"k" * 32
TIMEOUT_S = 60.0


@pytest.fixture
def hub():
    one = Hub(KEY)
    yield one
    one.close()


def until(true) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def join(hub: Hub, rank: int, uuid: str = "u", key: bytes = KEY):
    agent = connect(hub.host, hub.port, key)
    agent.send({"hello": {"rank": rank, "uuid": uuid, "pid": 1, "host": "here"}})
    return agent


def raw(hub: Hub) -> socket.socket:
    return socket.create_connection((hub.host, hub.port))


def test_listens_on_loopback_alone(hub: Hub) -> None:
    assert hub.host == "127.0.0.1"


def test_hello_beats_topics_and_answers(hub: Hub) -> None:
    got = []
    undo = hub.subscribe("step", lambda rank, message: got.append((rank, message)))
    agent = join(hub, 2)
    assert hub.wait_for({2: "u"}, TIMEOUT_S) == []
    assert hub.hello(2)["host"] == "here"
    agent.send({"beat": {"number": 5}})
    until(lambda: hub.beat(2)[1] == {"number": 5})
    agent.send({"topic": "step", "message": {"step": 1}})
    until(lambda: got == [(2, {"step": 1})])
    undo()
    number = hub.send(2, "look")
    request = agent.receive()
    assert request == {"do": "look", "id": number}
    agent.send({"topic": "step", "message": {"step": 2}})
    agent.send({"re": number, "stack": ["f"]})
    came_s, answer = hub.answer(number, TIMEOUT_S)
    assert answer["stack"] == ["f"]
    assert came_s <= time.monotonic()
    assert got == [(2, {"step": 1})]
    agent.close()


def test_a_rank_that_is_not_there_is_not_waited_for(hub: Hub) -> None:
    assert hub.send(0, "look") == 0
    assert hub.answer(0, TIMEOUT_S) is None
    assert hub.ask([0, 1], "look", TIMEOUT_S) == {}
    assert hub.clock_offset(0) is None
    assert hub.beat(0)[1] == {}


def test_another_uuid_is_another_process(hub: Hub) -> None:
    agent = join(hub, 0, "old")
    assert hub.wait_for({0: "old"}, TIMEOUT_S) == []
    assert hub.wait_for({0: "new"}, 0.01) == [0]
    hub.forget(0)
    with pytest.raises(WireError):
        while True:
            agent.receive()
    assert hub.hello(0) == {}
    agent.close()


def test_the_old_connection_of_a_rank_does_not_end_its_new_one(hub: Hub) -> None:
    old = join(hub, 0, "old")
    assert hub.wait_for({0: "old"}, TIMEOUT_S) == []
    new = join(hub, 0, "new")
    assert hub.wait_for({0: "new"}, TIMEOUT_S) == []
    old.close()
    hub.send(0, "look")
    assert new.receive()["do"] == "look"
    new.close()


def strangers(hub: Hub) -> list[socket.socket]:
    """Connections that are not ours, in every way that comes to mind."""
    silent = raw(hub)
    garbage = raw(hub)
    garbage.sendall(b"GET / HTTP/1.1\r\n\r\n" + bytes(range(256)) * 16)
    half = raw(hub)
    half.sendall(channel.MAGIC + b"short")
    huge = raw(hub)
    huge.sendall(channel.MAGIC + b"n" * channel.NONCE_BYTES + struct.pack(">I", 0xFFFFFFFF) + b"x" * 100)
    half_frame = raw(hub)
    half_frame.sendall(channel.MAGIC + b"n" * channel.NONCE_BYTES + struct.pack(">I", 100) + b"x" * 40)
    unsigned = raw(hub)
    unsigned.sendall(channel.MAGIC + b"n" * channel.NONCE_BYTES + struct.pack(">I", 2) + b"m" * 32 + b"{}")
    closed = raw(hub)
    closed.close()
    return [silent, garbage, half, huge, half_frame, unsigned]


def test_strangers_do_not_disturb(hub: Hub) -> None:
    agent = join(hub, 1)
    assert hub.wait_for({1: "u"}, TIMEOUT_S) == []
    with contextlib.ExitStack() as stack:
        for one in strangers(hub):
            stack.callback(one.close)
        wrong_key = join(hub, 1, "forged", b"w" * 32)
        stack.callback(wrong_key.close)
        with pytest.raises(WireError):
            wrong_key.receive()
        for _ in range(100):
            stack.callback(raw(hub).close)
        number = hub.send(1, "look")
        assert agent.receive()["id"] == number
        agent.send({"re": number})
        assert hub.answer(number, TIMEOUT_S) is not None
        assert hub.hello(1)["uuid"] == "u"
    agent.close()


@pytest.mark.parametrize("message", [{}, {"hello": 3}, {"hello": {}}, {"hello": {"rank": "x"}}, {"beat": {}}])
def test_a_broken_hello_ends_the_connection(hub: Hub, message) -> None:
    agent = connect(hub.host, hub.port, KEY)
    agent.send(message)
    with pytest.raises(WireError):
        agent.receive()
    agent.close()


def test_a_subscriber_that_raises_does_not_end_the_connection(hub: Hub) -> None:
    def fails(rank: int, message: object) -> None:
        raise ValueError("of the subscriber's own")

    hub.subscribe("step", fails)
    agent = join(hub, 0)
    agent.send({"topic": "step", "message": {}})
    agent.send({"beat": {"number": 9}})
    until(lambda: hub.beat(0)[1] == {"number": 9})
    agent.close()


def test_close_ends_all_threads() -> None:
    before = threading.active_count()
    hub = Hub(KEY)
    agent = join(hub, 0)
    silent = raw(hub)
    assert hub.wait_for({0: "u"}, TIMEOUT_S) == []
    hub.close()
    until(lambda: threading.active_count() <= before)
    agent.close()
    silent.close()


def test_messages_that_nobody_awaits_are_not_kept(hub: Hub) -> None:
    agent = join(hub, 0)
    assert hub.wait_for({0: "u"}, TIMEOUT_S) == []
    for number in range(5000):
        agent.send({"re": number})
    agent.send({"beat": {"number": 1}})
    until(lambda: hub.beat(0)[1] == {"number": 1})
    assert len(hub._answers) < 2000
    agent.close()
