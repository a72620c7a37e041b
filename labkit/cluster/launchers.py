"""ipyparallel launcher plugins that start the controller and the engines through a keeper.

Registered as entry points `labkit` of `ipyparallel.controller_launchers` and `ipyparallel.engine_launchers`. An engine
set holds one engine, the rank of its seat: so one rank can be stopped and started alone, through public calls.
"""

import json
import os
import signal

from ipyparallel.cluster.launcher import BaseLauncher, ControllerLauncher, EngineLauncher
from traitlets import Any as AnyTrait
from traitlets import Dict, Unicode

from labkit.cluster.keeping import Keeping
from labkit.errors import ClusterError


class _Kept(BaseLauncher):
    """A process that the keeper starts and ends."""

    keeping = AnyTrait(help="the keeper that starts the process")
    pid = 0

    async def stop(self) -> None:
        """End the process."""
        if self.running:
            self.signal(signal.SIGKILL)

    def signal(self, sig: int) -> None:
        """Send a signal, unless the process is gone."""
        keeping: Keeping = self.keeping
        keeping.command("signal", pid=self.pid, signal=int(sig))

    def poll(self) -> int | None:
        """None while the process has not been told to stop."""
        return None if self.running else 0

    def get_output(self, remove: bool = False) -> str:
        """Logs stay in the keeper's folder."""
        return ""


class KeptControllerLauncher(_Kept, ControllerLauncher):
    """The ipyparallel controller as a child of the keeper."""

    def find_args(self) -> list[str]:
        """The controller's command line."""
        return [*self.controller_cmd, *self.cluster_args, *self.controller_args]

    async def start(self) -> None:
        """Start the process; its connection files appear later."""
        keeping: Keeping = self.keeping
        reply = keeping.command("program", name="controller", argv=self.args, env={**os.environ, **self.get_env()})
        self.pid = reply["pid"]
        self.notify_start({"pid": self.pid})


class RankLauncher(_Kept, EngineLauncher):
    """One rank: forked from the keeper (imports are shared), or spawned where forking cannot be used."""

    seat = Dict(help="what the rank is told, see labkit.cluster.engine")
    start_method = Unicode("fork")
    spare_pid = AnyTrait(None, allow_none=True, help="a forked process without a seat, to be given this one")

    def find_args(self) -> list[str]:
        """Where a spawned rank begins; a forked one begins inside the keeper."""
        return [self.engine_cmd[0], "-m", "labkit.cluster.engine"]

    async def start(self, n: int = 1) -> None:
        """Start the rank; it registers with the controller a little later."""
        if n != 1:
            raise ClusterError(f"{n} engines were asked of one seat: a seat is for one rank.")
        keeping: Keeping = self.keeping
        seat = {**self.seat, "connection": self.environment["IPP_CONNECTION_INFO"]}
        name = f"rank{seat['rank']}"
        if self.spare_pid is not None:
            reply = keeping.command("assign", pid=self.spare_pid, seat=seat, name=name)
        elif self.start_method == "fork":
            reply = keeping.command("fork", target="labkit.cluster.engine:run", seat=seat, name=name)
        else:
            # The key travels on stdin alone: a command line or an environment can be read by others.
            env = {name: value for name, value in self.get_env().items() if name != "IPP_CONNECTION_INFO"}
            stdin = json.dumps(seat) + "\n"
            reply = keeping.command(
                "program", name=name, argv=self.args, env={**os.environ, **env}, stdin=stdin, uuid=seat["uuid"]
            )
        self.pid = reply["pid"]
        self.notify_start({"pid": self.pid})
