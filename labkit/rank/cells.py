"""The IPython shell of a rank: `%%px` cells run in it, and nothing that a cell says ends the rank by mistake."""

import warnings
import zlib
from typing import Any

from IPython.core.getipython import get_ipython

_prepared: Any = None


def shell() -> Any:
    """This rank's shell (None in a bare process)."""
    global _prepared
    found = get_ipython()
    if found is not None and found is not _prepared:
        _prepare(found)
        _prepared = found
    return found


def _prepare(found: Any) -> None:
    # `exit` in a cell raises like sys.exit: the rank stays, and the notebook is told.
    found.ask_exit = _leave
    # The same name on every rank, so that equal errors are recognised as equal.
    found.compile.get_code_name = _name
    # What a cell raises goes to the notebook, which shows it once for all ranks.
    found.showtraceback = found.showsyntaxerror = found.show_usage_error = _show_nothing
    warnings.filterwarnings("ignore", message="To exit: use", category=UserWarning)


def _leave() -> None:
    raise SystemExit("exit() ends no rank: use ranks.stop() in the notebook")


def _show_nothing(*_: Any, **__: Any) -> None:
    pass


def _name(raw_code: str, code: str, number: int) -> str:
    return f"<%%px cell {zlib.crc32(raw_code.encode('utf-8', 'replace')):08x}>"
