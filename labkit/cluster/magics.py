"""`%%px` and its kin on the ranks, with output labelled by rank and the lab's errors."""

import contextlib
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ipyparallel.client.magics import ParallelMagics
from IPython.core.getipython import get_ipython
from IPython.core.magic_arguments import parse_argstring

from labkit.cluster.checks import check_ranks
from labkit.errors import ClusterError, PlanError

if TYPE_CHECKING:
    from labkit.cluster.call import Call
    from labkit.cluster.ranks import Ranks

STOPPED = "The ranks of this %px were stopped. Start new ones: ranks = lk.cluster.start(4)."


@dataclass(slots=True)
class Defaults:
    """What `%pxconfig` sets: where cells run, and whether `%px` waits for them."""

    targets: list[int] = field(default_factory=list)
    block: bool = True


class RankMagics(ParallelMagics):  # type: ignore[misc]
    """ipyparallel's magics, run as calls of the lab: they can be interrupted, and a rank that dies is named."""

    def __init__(self, shell: Any, ranks: "Ranks") -> None:
        self._ranks = weakref.ref(ranks)
        self._world_size = ranks.world_size
        super().__init__(shell, Defaults(targets=list(range(ranks.world_size))))

    def belongs_to(self, ranks: "Ranks") -> bool:
        """Whether these magics run on `ranks`."""
        return self._ranks() is ranks

    def parallel_execute(self, cell: str, **_: Any) -> "Call | None":
        """Run a line, or in `%autopx` mode a cell, on the ranks that `%pxconfig` names."""
        call = self._submit(cell, self.view.targets)
        return self._finish(call, self.view.block)

    def cell_px(self, line: str = "", cell: str = "") -> "Call | None":
        """Run the cell on every rank: `%%px [--targets 0,2 | 1:3 | all] [--noblock] [--out NAME] [--local]`.

        `--ranks` is another name for `--targets`. `--noblock` returns the call at once, `--out` keeps it under a name,
        `--local` runs the cell here too.
        """
        args = parse_argstring(ParallelMagics.cell_px, line.replace("--ranks", "--targets"))
        targets = self._eval_target_str(args.targets) if args.targets else self.view.targets
        call = self._submit(cell, targets)
        if args.save_name:
            self.shell.user_ns[args.save_name] = call
        if args.local:
            self.shell.run_cell(cell)
        return self._finish(call, self.view.block if args.block is None else args.block)

    def result(self, line: str = "") -> None:
        """Wait for the last `%px`, show what it printed, and raise what it raised: `%pxresult [--out NAME]`."""
        args = parse_argstring(ParallelMagics.result, line)
        if self.last_result is None:
            raise PlanError("No %px ran yet: %pxresult is about the last one.")
        if args.save_name:
            self.shell.user_ns[args.save_name] = self.last_result
        self._finish(self.last_result, True)

    def end_autopx(self) -> None:
        """Leave `%autopx` mode, if it is on."""
        self._disable_autopx()

    def _submit(self, cell: str, targets: list[int]) -> "Call":
        ranks = self._ranks()
        if ranks is None:
            raise ClusterError(STOPPED)
        self.last_result = ranks._submit_cell(cell, targets)
        return self.last_result

    def _finish(self, call: "Call", block: bool) -> "Call | None":
        """Wait for a call, unless it is to go on in the background: then it is what the magic returns."""
        if not block:
            return call
        ranks = self._ranks()
        if ranks is None:
            call.result()
        else:
            ranks._finish(call)
        return None

    def _eval_target_str(self, ts: str) -> list[int]:
        """`--targets 0,2`, `1:3`, `all`."""
        text = ts.strip("[]() ")
        try:
            if text == "all":
                return list(range(self._world_size))
            if ":" in text:
                named = list(range(self._world_size))[slice(*(int(part) if part else None for part in text.split(":")))]
            else:
                named = [int(part) for part in text.split(",")]
        except (ValueError, TypeError):
            raise PlanError(f"--targets {ts}: ranks are named like 0,2 or 1:3 or all.") from None
        return check_ranks(named, self._world_size)


_current: RankMagics | None = None
_untouched = False


@contextlib.contextmanager
def untouched() -> Iterator[None]:
    """Ranks that are started within it are not the learner's: `%px` stays where it was."""
    global _untouched
    _untouched = True
    try:
        yield
    finally:
        _untouched = False


def activate(ranks: "Ranks") -> None:
    """Register `%px`, `%%px`, `%autopx`, `%pxresult` and `%pxconfig` for these ranks, in IPython only."""
    global _current
    shell = get_ipython()
    if shell is None or _untouched:
        return
    if _current is not None:
        _current.end_autopx()
    _current = RankMagics(shell, ranks)
    shell.magics_manager.register(_current)


def deactivate(ranks: "Ranks") -> None:
    """Let go of stopped ranks: cells run here again; `%%px` stays and says that the ranks were stopped."""
    if _current is not None and _current.belongs_to(ranks):
        _current.end_autopx()
