"""Turns a fresh process into a rank: interrupts, watched sockets, agent. The engine around it is the cluster's."""

import json
from typing import Any

import torch

from labkit.rank import agent, calls, groups, release


def begin(seat: dict[str, Any]) -> None:
    """Prepare this process for its seat; called in the main thread, before the engine starts to take calls.

    The environment (`CUDA_VISIBLE_DEVICES` above all) is set by the caller, before anything of CUDA is touched.
    """
    torch.set_num_threads(int(seat["num_threads"]))
    groups.seat(int(seat["rank"]), seat["env"]["LABKIT_BACKEND"])
    ports: set[int] = set()
    for value in json.loads(seat["connection"]).values():  # a port, a list of ports, or something else
        ports.update(one for one in (value if isinstance(value, list) else [value]) if isinstance(one, int))
    release.install(ports | {int(seat["hub_port"])})
    calls.install()
    hello = {"rank": seat["rank"], "uuid": seat["uuid"]}
    agent.start(seat["hub_host"], int(seat["hub_port"]), bytes.fromhex(seat["key"]), hello)
