"""`%%px` and its kin on the ranks, with output labelled by rank and the lab's errors."""

import sys
import weakref
from typing import TYPE_CHECKING, Any

from IPython.core.getipython import get_ipython
from ipyparallel.client.magics import ParallelMagics

from labkit.cluster.checks import check_ranks
from labkit.errors import PlanError

if TYPE_CHECKING:
    from labkit.cluster.ranks import Ranks


class RankMagics(ParallelMagics):  # type: ignore[misc]
    """ipyparallel's magics, run as calls of the lab: they can be interrupted, and a rank that dies is named."""

    def __init__(self, shell: Any, ranks: "Ranks", view: Any) -> None:
        super().__init__(shell, view)
        self._ranks = weakref.ref(ranks)
        self._world_size = ranks.world_size

    def parallel_execute(self, cell: str, block: bool | None = None, save_name: str | None = None, **_: Any) -> Any:
        """Run a cell on the view's ranks; `--noblock` returns the call at once."""
        ranks = self._ranks()
        if ranks is None:
            raise PlanError("The ranks of this %px were stopped. Start new ones: ranks = lk.cluster.start(4).")
        block = self.view.block if block is None else block
        call = ranks._run("%%px", "labkit.rank.calls:run_cell", (cell,), {}, self._targets(), 3600.0, False)
        self.last_result = call
        if save_name:
            self.shell.user_ns[save_name] = call
        if not block:
            return call
        try:
            call.result()
        except KeyboardInterrupt:
            ranks._freeing.quietly()
            raise
        return None

    def result(self, line: str = "") -> Any:
        """Wait for the last `%px --noblock` and show what it printed."""
        if self.last_result is None:
            raise PlanError("No %px ran yet: %pxresult shows the last one.")
        self.last_result.result()

    def _eval_target_str(self, ts: str) -> list[int]:
        """`--targets 0,2`, `1:3`, `all`."""
        every = list(range(self._world_size))
        try:
            if ts == "all":
                return every
            if ":" in ts:
                return every[slice(*(int(part) if part else None for part in ts.split(":")))]
            return check_ranks([int(part) for part in ts.strip("[]() ").split(",")], self._world_size)
        except ValueError as error:
            if isinstance(error, PlanError):
                raise
            raise PlanError(f"--targets {ts}: ranks are named like 0,2 or 1:3 or all.") from error

    def _targets(self) -> list[int]:
        targets = self.view.targets
        if isinstance(targets, int):
            targets = [targets]
        return check_ranks(None if targets in ("all", None) else targets, self._world_size)


def activate(ranks: "Ranks") -> None:
    """Register `%px`, `%%px`, `%autopx`, `%pxresult` and `%pxconfig` for these ranks, in IPython only."""
    shell = get_ipython()
    if shell is None:
        return
    view = ranks._crew.engines.view(list(range(ranks.world_size)))
    shell.magics_manager.register(RankMagics(shell, ranks, view))


def deactivate(ranks: "Ranks") -> None:
    """Let go of stopped ranks; the magics stay and say so."""
    sys.stdout.flush()
