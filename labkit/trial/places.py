"""The lines of an answer: which files are its own, what a learner calls them, and what stands in them."""

import linecache
import os
import re
from collections.abc import Iterable, Mapping

from labkit.cluster.frames import cell_name

__all__ = ["Places"]

# A frame as a rank tells it; the notebook's end has put a cell's own name in the place of its file.
_FRAME = re.compile(
    r'^  (?:File "(?P<file>[^"\n]+)"|(?P<cell>[^"\n]+?)), line (?P<line>\d+), in [^\n]*(?:\n    (?P<source>[^\n]+))?',
    re.MULTILINE,
)


class Places:
    """Tells lines of the answer from all others."""

    def __init__(self, cells: Mapping[str, str], files: Iterable[str] = ()) -> None:
        """Take note of what is the answer's.

        Args:
            cells: the source of each cell that is defined on the ranks alone, by its name.
            files: files in which functions of the answer stand; cells of this notebook need not be named.
        """
        self._cells = dict(cells)
        self._files = {file: os.path.basename(file) for file in files}

    def name(self, file: str) -> str:
        """What a learner calls a file of the answer; "" for any other file."""
        return file if file in self._cells else cell_name(file) or self._files.get(file, "")

    def told(self, file: str, line: int) -> str:
        """A line of the answer with its text, such as "Cell In[3], line 7: dist.recv(buffer)"."""
        lines = self._cells[file].splitlines() if file in self._cells else linecache.getlines(file)
        return _told(self.name(file), line, lines[line - 1] if line <= len(lines) else "")

    def innermost(self, traceback: str) -> str:
        """The answer's innermost line in the traceback of a rank; "" when none is in it."""
        own = [frame for frame in _FRAME.finditer(traceback) if frame["cell"] or self.name(frame["file"])]
        if not own:
            return ""
        name = own[-1]["cell"] or self.name(own[-1]["file"])
        return _told(name, int(own[-1]["line"]), own[-1]["source"] or "")


def _told(name: str, line: int, source: str) -> str:
    place = f"{name}, line {line}"
    return f"{place}: {source.strip()}" if source.strip() else place
