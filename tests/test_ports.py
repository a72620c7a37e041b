"""Ports for the controller: a whole free block, nobody else's, back when its owner lets go."""

import gc
import itertools
import socket

import pytest

import labkit as lk
from labkit.cluster import ports
from labkit.cluster.ports import BLOCK, LOWEST, Ports
from labkit.errors import ClusterError

HOST = "127.0.0.1"


def test_blocks_are_whole_free_and_apart() -> None:
    held = [Ports(HOST) for _ in range(20)]
    try:
        numbers = [one.numbers for one in held]
        assert {len(one) for one in numbers} == {BLOCK - 1}
        assert len(set(itertools.chain(*numbers))) == 20 * (BLOCK - 1)
        assert min(map(min, numbers)) > LOWEST
        assert max(map(max, numbers)) < ports._kernel_start()
        for number in numbers[0]:
            socket.create_server((HOST, number)).close()
    finally:
        for one in held:
            one.close()


def test_a_block_is_nobody_elses_until_it_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    first = Ports(HOST)
    try:
        monkeypatch.setattr(ports, "LOWEST", first.numbers[0] - 1)
        monkeypatch.setattr(ports, "_kernel_start", lambda: first.numbers[0] - 1 + BLOCK)
        assert Ports(HOST).numbers == []
        first.close()
        with socket.create_server((HOST, first.numbers[5])):
            assert Ports(HOST).numbers == []
        again = Ports(HOST)
        assert again.numbers == first.numbers
        again.close()
        monkeypatch.setattr(ports, "_kernel_start", lambda: 1024)
        assert Ports(HOST).numbers == []
    finally:
        first.close()


@pytest.mark.parametrize("num_binds", [1, 2, BLOCK])
def test_ctrl_c_leaves_no_port_bound(monkeypatch: pytest.MonkeyPatch, num_binds: int) -> None:
    """A socket that is left open is a warning, and so a failure here."""
    bind, firsts = Ports._bind, []

    def interrupted(self: Ports, sock: socket.socket, port: int) -> bool:
        firsts.append(port)
        if len(firsts) == num_binds:
            raise KeyboardInterrupt
        return bind(self, sock, port)

    monkeypatch.setattr(Ports, "_bind", interrupted)
    with pytest.raises(KeyboardInterrupt):
        Ports(HOST)
    gc.collect()
    socket.create_server((HOST, firsts[0])).close()


def test_a_block_that_nobody_holds_is_given_back() -> None:
    first = Ports(HOST).numbers[0] - 1
    gc.collect()
    socket.create_server((HOST, first)).close()


@pytest.mark.ranks
def test_a_controller_that_cannot_have_its_ports_is_heard_of_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the time limit otherwise; there, other clusters took ports that were to be the controller's."""

    class Taken(Ports):
        def __init__(self, host: str) -> None:
            super().__init__(host)
            self.taken = [socket.create_server((host, number)) for number in self.numbers]

        def close(self) -> None:
            for one in self.taken:
                one.close()
            super().close()

    monkeypatch.setattr("labkit.cluster.engines.Ports", Taken)
    with pytest.raises(ClusterError, match=r"controller \(pid \d+\) ended \(exit code 1\).*last words.*in use"):
        lk.cluster.start(1, timeout_s=200)
