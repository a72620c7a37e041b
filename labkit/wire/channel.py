"""Signed JSON frames over one TCP connection, both ends.

Each side opens with a nonce; both derive the connection's key from the shared key and the two nonces (HMAC-SHA256), and
every frame carries the HMAC of its direction, its number and its body. A frame that is altered, replayed or sent by
somebody without the key ends the connection. Bodies are JSON, never pickles.
"""

import hashlib
import hmac
import json
import os
import socket
import struct
import threading
from typing import Any

MAGIC = b"labkit-1"
NONCE_BYTES = 16
MAC_BYTES = 32
MAX_BODY_BYTES = 16 << 20
HANDSHAKE_TIMEOUT_S = 10.0
SEND_TIMEOUT_S = 30.0

_LENGTH = struct.Struct(">I")
_COUNTER = struct.Struct(">Q")


class WireError(ConnectionError):
    """The other end is gone, does not know the key, or sent something that is no frame of ours."""


class Channel:
    """One authenticated connection; `send` may be called by any thread, `receive` by one."""

    def __init__(self, sock: socket.socket, session_key: bytes, *, ours: bytes, theirs: bytes) -> None:
        self._sock = sock
        self._key = session_key
        self._ours, self._theirs = ours, theirs
        self._num_sent = self._num_received = 0
        self._send_lock = threading.Lock()

    def fileno(self) -> int:
        """The socket's descriptor, for `select`."""
        return self._sock.fileno()

    def send(self, message: dict[str, Any]) -> None:
        """Sign and send one message.

        Raises:
            WireError: the other end is gone, does not read, or the message is over 16 MiB.
        """
        body = json.dumps(message, separators=(",", ":")).encode()
        if len(body) > MAX_BODY_BYTES:
            raise WireError(f"a message of {len(body)} bytes: at most {MAX_BODY_BYTES} travel in one frame.")
        with self._send_lock:
            mac = self._mac(self._ours, self._num_sent, body)
            self._num_sent += 1
            try:
                self._sock.sendall(_LENGTH.pack(len(body)) + mac + body)
            except OSError as error:
                raise WireError(f"the connection is closed ({error}).") from error

    def receive(self) -> dict[str, Any]:
        """Wait for the next message and check its signature.

        Raises:
            WireError: the connection ended, or the frame is not ours.
        """
        (length,) = _LENGTH.unpack(_read(self._sock, _LENGTH.size))
        if length > MAX_BODY_BYTES:
            raise WireError(f"a frame of {length} bytes was announced: at most {MAX_BODY_BYTES} are taken.")
        mac = _read(self._sock, MAC_BYTES)
        body = _read(self._sock, length)
        if not hmac.compare_digest(mac, self._mac(self._theirs, self._num_received, body)):
            raise WireError("a frame with a wrong signature: the other end does not know the key.")
        self._num_received += 1
        message = json.loads(body)
        if not isinstance(message, dict):
            raise WireError(f"a frame holds a {type(message).__name__}: messages are objects.")
        return message

    def close(self) -> None:
        """End the connection; a `receive` that waits in another thread raises `WireError`."""
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        self._sock.close()

    def _mac(self, direction: bytes, number: int, body: bytes) -> bytes:
        return hmac.digest(self._key, direction + _COUNTER.pack(number) + body, hashlib.sha256)


def connect(host: str, port: int, key: bytes, timeout_s: float = HANDSHAKE_TIMEOUT_S) -> Channel:
    """Open a connection to a hub and agree on its key."""
    sock = socket.create_connection((host, port), timeout=timeout_s)
    return _agree(sock, key, ours=b"C", theirs=b"S")


def accept(sock: socket.socket, key: bytes, timeout_s: float = HANDSHAKE_TIMEOUT_S) -> Channel:
    """Agree on a key with whoever just connected; its first `receive` shows whether it knows the shared one."""
    sock.settimeout(timeout_s)
    return _agree(sock, key, ours=b"S", theirs=b"C")


def _agree(sock: socket.socket, key: bytes, *, ours: bytes, theirs: bytes) -> Channel:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    nonce = os.urandom(NONCE_BYTES)
    try:
        sock.sendall(MAGIC + nonce)
        hello = _read(sock, len(MAGIC) + NONCE_BYTES)
    except OSError as error:
        sock.close()
        raise WireError(f"no handshake ({error}).") from error
    if not hello.startswith(MAGIC):
        sock.close()
        raise WireError("the other end speaks another protocol.")
    theirs_nonce = hello[len(MAGIC) :]
    nonces = nonce + theirs_nonce if ours == b"C" else theirs_nonce + nonce
    sock.settimeout(None)
    # A reader that stopped (a paused notebook) must not hold the sender for ever.
    seconds, micros = int(SEND_TIMEOUT_S), 0
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", seconds, micros))
    return Channel(sock, hmac.digest(key, nonces, hashlib.sha256), ours=ours, theirs=theirs)


def _read(sock: socket.socket, num_bytes: int) -> bytes:
    data = bytearray()
    while len(data) < num_bytes:
        try:
            part = sock.recv(min(num_bytes - len(data), 1 << 20))
        except OSError as error:
            raise WireError(f"the connection is closed ({error}).") from error
        if not part:
            raise WireError("the connection is closed by the other end.")
        data += part
    return bytes(data)
