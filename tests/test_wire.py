"""The channel between a rank's agent and the notebook, and packed calls, without ranks."""

import functools
import json
import os
import socket
import struct
import sys
import threading

import cloudpickle
import pytest

from labkit.errors import Failure, PlanError
from labkit.wire import Channel, Outcome, WireError, accept, connect, load_outcome, pack_call
from labkit.wire.channel import MAX_BODY_BYTES
from labkit.wire.parcel import check_dotted, load_value, open_call, resolve

KEY = b"k" * 32


def pair(key: bytes = KEY, other: bytes = KEY) -> tuple[Channel, Channel]:
    """Two ends over a real loopback connection."""
    made: list[Channel] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        host, port = listener.getsockname()[:2]
        joining = threading.Thread(target=lambda: made.append(connect(host, port, key)))
        joining.start()
        server = accept(listener.accept()[0], other)
        joining.join()
    return made[0], server


def test_messages_travel_both_ways() -> None:
    ours, theirs = pair()
    for number in range(3):
        ours.send({"number": number, "text": "é☃" * 1000})
        assert theirs.receive() == {"number": number, "text": "é☃" * 1000}
        theirs.send({"back": number})
        assert ours.receive() == {"back": number}
    ours.close()
    theirs.close()


def test_a_wrong_key_is_found_at_the_first_message() -> None:
    ours, theirs = pair(KEY, b"x" * 32)
    ours.send({"hello": {}})
    with pytest.raises(WireError, match="does not know the key"):
        theirs.receive()
    ours.close()
    theirs.close()


def test_a_stranger_that_speaks_something_else_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        stranger = socket.create_connection(listener.getsockname()[:2])
        stranger.sendall(b"GET / HTTP/1.1\r\nHost: somewhere\r\n\r\n")
        with pytest.raises(WireError, match="another protocol"):
            accept(listener.accept()[0], KEY)
        stranger.close()


def test_a_stranger_that_says_nothing_is_given_up() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        stranger = socket.create_connection(listener.getsockname()[:2])
        with pytest.raises(WireError):
            accept(listener.accept()[0], KEY, timeout_s=0.05)
        stranger.close()


@pytest.mark.parametrize("part", ["body", "mac", "replay", "length", "list"])
def test_frames_that_are_not_ours_end_the_connection(part: str) -> None:
    ours, theirs = pair()
    body = json.dumps(["a list"] if part == "list" else {"number": 1}).encode()
    mac = ours._mac(ours._ours, 0, body)
    frame = struct.pack(">I", len(body)) + mac + body
    if part == "body":
        frame = frame[:-2] + b"9}"
    elif part == "mac":
        frame = frame[:4] + bytes(32) + body
    elif part == "length":
        frame = struct.pack(">I", MAX_BODY_BYTES + 1) + frame[4:]
    elif part == "replay":
        ours._sock.sendall(frame)
        assert theirs.receive() == {"number": 1}
    ours._sock.sendall(frame)
    with pytest.raises(WireError):
        theirs.receive()
    ours.close()
    theirs.close()


def test_the_end_of_the_other_side_is_an_error_not_a_hang() -> None:
    ours, theirs = pair()
    ours.close()
    with pytest.raises(WireError, match="closed"):
        theirs.receive()
    theirs.close()
    with pytest.raises(WireError, match="closed"):
        theirs.send({"a": 1})


def test_a_message_over_the_limit_is_refused_with_both_sizes() -> None:
    ours, theirs = pair()
    with pytest.raises(WireError, match=f"at most {MAX_BODY_BYTES}"):
        ours.send({"text": "x" * MAX_BODY_BYTES})
    ours.close()
    theirs.close()


def test_many_threads_may_send_at_once() -> None:
    ours, theirs = pair()
    threads = [threading.Thread(target=lambda: [ours.send({"n": n}) for n in range(50)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    got = [theirs.receive()["n"] for _ in range(200)]
    for thread in threads:
        thread.join()
    assert sorted(got) == sorted(list(range(50)) * 4)
    ours.close()
    theirs.close()


# -- parcels ---------------------------------------------------------------------------------------------------------


def test_a_call_comes_out_as_it_went_in() -> None:
    fn, args, kwargs = open_call(pack_call(max, (1, [2]), {"key": str}), {})
    assert (fn, args, kwargs) == (max, (1, [2]), {"key": str})


def test_a_notebook_function_keeps_the_name_of_its_cell_and_sees_the_names_of_the_rank() -> None:
    cell = "def f(x):\n    return helper(x) + from_the_rank\n\ndef helper(x):\n    return x * other\n"
    namespace: dict[str, object] = {"__name__": "__main__"}
    exec(compile(cell, "<the cell>", "exec"), namespace)
    packed = pack_call(namespace["f"], (2,), {})  # type: ignore[arg-type]
    fn, args, _ = open_call(packed, {"from_the_rank": 5, "other": 10})
    assert fn.__code__.co_filename == "<the cell>"
    assert fn(*args) == 25
    partial, args, _ = open_call(
        pack_call(functools.partial(namespace["f"], 1), (), {}), {"from_the_rank": 1, "other": 1}
    )  # type: ignore[arg-type]
    assert partial() == 2


def test_names_of_the_notebook_win_over_those_of_the_rank() -> None:
    namespace: dict[str, object] = {"__name__": "__main__", "shared": "notebook"}
    exec("def f():\n    return shared", namespace)
    fn, _, _ = open_call(pack_call(namespace["f"], (), {}), {"shared": "rank"})  # type: ignore[arg-type]
    assert fn() == "notebook"


class Leaves:
    """Ends the process that unpickles it."""

    def __reduce__(self) -> tuple[object, ...]:
        return sys.exit, (3,)


class LeavesAtOnce:
    """Ends the process that pickles it."""

    def __reduce__(self) -> tuple[object, ...]:
        raise SystemExit(4)


@pytest.mark.parametrize(
    ("fn", "args", "kwargs", "named"),
    [
        (len, (1, threading.Lock()), {}, "argument 2 of type lock"),
        (len, (), {"where": threading.Lock()}, "argument where= of type lock"),
        (len, (LeavesAtOnce(),), {}, "argument 1 of type LeavesAtOnce"),
        (functools.partial(len, threading.Lock()), (), {}, "the function partial, or a variable that it uses"),
    ],
)
def test_what_cannot_travel_is_named(fn, args, kwargs, named: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(PlanError, match="cannot be sent to the ranks") as caught:
        pack_call(fn, args, kwargs)
    assert named in str(caught.value)


def test_an_argument_that_leaves_while_it_is_opened_is_an_error() -> None:
    with pytest.raises(PlanError, match="cannot be unpickled on the rank"):
        open_call(cloudpickle.dumps((len, (Leaves(),), {})), {})


@pytest.mark.parametrize("dotted", ["", "os", "os:", ":x", "os..:x", " : ", "os:a b", "os.path.join", "a:b:c"])
def test_a_text_that_names_no_function_is_refused(dotted: str) -> None:
    with pytest.raises(PlanError, match=r"package.module:function"):
        check_dotted(dotted)


@pytest.mark.parametrize(
    ("dotted", "why"),
    [("no_such_module:f", "no module"), ("os:nope", "not there"), ("os:environ", "not a function")],
)
def test_a_dotted_name_that_leads_nowhere_says_why(dotted: str, why: str) -> None:
    with pytest.raises(PlanError, match=why):
        resolve(dotted)


def test_a_dotted_name_finds_its_function() -> None:
    assert resolve("os.path:join") is os.path.join


def test_outcomes_keep_values_and_failures() -> None:
    value = Outcome(value=cloudpickle.dumps([1, 2]), printed=True)
    assert load_outcome(value.dumps()) == value
    assert load_value(value) == ([1, 2], None)
    failed = Outcome(failure=Failure(type="ValueError", message="no"))
    assert load_outcome(failed.dumps()) == failed


def test_a_broken_outcome_and_a_value_that_leaves_are_failures() -> None:
    broken = load_outcome(b"junk")
    assert broken.failure is not None
    assert "cannot be read" in broken.failure.message
    value, failure = load_value(Outcome(value=cloudpickle.dumps(Leaves())))
    assert value is None
    assert failure is not None
    assert failure.type == "SystemExit"
    assert "cannot be unpickled in the notebook" in failure.message
