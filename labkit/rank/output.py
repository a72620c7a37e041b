"""What a rank prints, held to an amount that a notebook can show."""

from typing import Any

from ipykernel.iostream import OutStream

MAX_BYTES_PER_CALL = 64 << 10

_streams: list["RankStream"] = []


class RankStream(OutStream):
    """A rank's stdout or stderr: the first 64 KiB of each call pass, the rest is counted and said once."""

    def __init__(self, session: Any, pub_thread: Any, name: str, **kwargs: Any) -> None:
        # File descriptors 1 and 2 go to the rank's log file: what libraries write there is not the learner's output.
        super().__init__(session, pub_thread, name, watchfd=False, **kwargs)
        self._left = MAX_BYTES_PER_CALL
        self._num_dropped = 0
        self.printed = False
        _streams.append(self)

    def write(self, string: str) -> int | None:  # type: ignore[override]
        """Pass text on while the call's allowance lasts."""
        if not isinstance(string, str):
            return super().write(string)  # raises the error that a text stream raises
        if self._left <= 0:
            self._num_dropped += len(string)
            return len(string)
        if len(string) > self._left:
            self._num_dropped += len(string) - self._left
            string = string[: self._left]
        self._left -= len(string)
        self.printed = True
        return super().write(string)

    def begin_call(self) -> None:
        """A call begins: it has the whole allowance."""
        self._left = MAX_BYTES_PER_CALL
        self._num_dropped = 0
        self.printed = False

    def end_call(self) -> None:
        """Say what was left out, if anything was."""
        if self._num_dropped:
            dropped, self._num_dropped = self._num_dropped, 0
            shown = MAX_BYTES_PER_CALL >> 10
            super().write(f"\n[{dropped / 1e6:.1f} MB more not shown: at most {shown} KiB a call are]\n")


def begin_call() -> None:
    """Give both streams a new allowance."""
    for stream in _streams:
        stream.begin_call()


def end_call() -> bool:
    """Close both streams' account of the call; returns whether anything was printed."""
    for stream in _streams:
        stream.end_call()
    return any(stream.printed for stream in _streams)
