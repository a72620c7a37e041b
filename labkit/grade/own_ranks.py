"""The ranks that `check` starts for itself: at its first use, kept for later checks, gone with the kernel."""

import contextlib
import threading

from labkit import cluster
from labkit.cluster import Ranks, magics
from labkit.errors import LabError

__all__ = ["NUM_RANKS", "ready"]

NUM_RANKS = 4

_lock = threading.Lock()
_own: Ranks | None = None


def ready() -> Ranks:
    """Idle ranks of the lab's own; new ones where there are none yet, or where those there are cannot be used.

    Raises:
        ClusterError: they do not start.
    """
    global _own
    with _lock:
        if _own is not None and not _is_whole(_own):
            with contextlib.suppress(LabError):
                _own.stop()
            _own = None
        if _own is None:
            with magics.untouched():
                _own = cluster.start(NUM_RANKS)
        return _own


def _is_whole(ranks: Ranks) -> bool:
    """Whether the ranks can be used, after whatever is amiss in them was put right."""
    try:
        for one in ranks.status():
            if one.state in ("lost", "paused"):
                ranks.restart(one.rank)
        ranks.interrupt(force=True)
    except LabError:
        return False
    return True
