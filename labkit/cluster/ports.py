"""Ports for ipyparallel's controller that nobody else is given while it starts.

ipyparallel asks the kernel for free ports, lets go of them, and binds them up to seconds later. Meanwhile the kernel
gives them to whoever asks for any port, such as the ranks of other clusters; the controller then never answers. The
kernel gives nobody a port outside its range, so ports are taken from below it, and a guard keeps other clusters away.
"""

import contextlib
import random
import socket
import weakref

LOWEST = 10_000
BLOCK = 32
"""The guard's port and more than the controller binds: 18 in ipyparallel 9.2."""
KERNEL_RANGE = "/proc/sys/net/ipv4/ip_local_port_range"
DEFAULT_KERNEL_START = 32_768
MAX_TRIES = 200


class Ports:
    """A block of ports on a loopback address, kept from other clusters until `close`, or until it is forgotten.

    Attributes:
        numbers: the ports to give away; empty where no block is free, or the kernel's range leaves no room.
    """

    def __init__(self, host: str) -> None:
        self._host = host
        self._guard = contextlib.ExitStack()
        weakref.finalize(self, self._guard.close)  # Ctrl-C may come before anybody holds it
        self.numbers: list[int] = []
        num_blocks = (_kernel_start() - LOWEST) // BLOCK
        places = random.sample(range(num_blocks), min(MAX_TRIES, num_blocks)) if num_blocks > 0 else []
        for place in places:
            first = LOWEST + place * BLOCK
            with contextlib.ExitStack() as tried:
                if not self._bind(tried.enter_context(socket.socket()), first):
                    continue
                numbers = [port for port in range(first + 1, first + BLOCK) if self._is_free(port)]
                if len(numbers) == BLOCK - 1:
                    self._guard.enter_context(tried.pop_all())
                    self.numbers = numbers
                    return

    def close(self) -> None:
        """Let others have the block."""
        self._guard.close()

    def _is_free(self, port: int) -> bool:
        with socket.socket() as tried:
            return self._bind(tried, port)

    def _bind(self, sock: socket.socket, port: int) -> bool:
        """Bind a socket, which listens to nobody; False where somebody has the port."""
        try:
            sock.bind((self._host, port))
        except OSError:
            return False
        return True


def _kernel_start() -> int:
    """The lowest port that the kernel gives to whoever asks for any."""
    try:
        with open(KERNEL_RANGE) as file:
            return int(file.read().split()[0])
    except (OSError, ValueError, IndexError):
        return DEFAULT_KERNEL_START
