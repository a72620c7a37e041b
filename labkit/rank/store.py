"""The rendezvous store, in a process of its own: no rank's death takes it along."""

import signal
from typing import Any

import torch.distributed as dist


def serve(seat: dict[str, Any]) -> None:
    """Serve on the listening socket that the keeper bound (to loopback for local ranks); never returns.

    `TCPStore` left to itself listens on every interface without authentication, so it is given a socket.
    """
    store = dist.TCPStore(
        seat["host"], seat["port"], is_master=True, wait_for_workers=False, master_listen_fd=seat["listen_fd"]
    )
    while store is not None:  # the server lives as long as this object
        signal.pause()
