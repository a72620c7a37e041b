"""Texts and names that come from submissions, made harmless for pages, tables and file names."""

import hashlib
import html
import re
import unicodedata
from collections.abc import Iterable
from typing import Any

__all__ = ["cell", "code_marked", "file_names", "one_line", "plain", "shown"]

MAX_CHARS = 1_500
MAX_NAME_CHARS = 120
MAX_FILE_NAME_CHARS = 60

# Terminal escape sequences: colours and cursor moves (CSI), titles and links (OSC), two-character ones.
_ANSI = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?|\x1b[@-Z\\^_]")
# Control, format (direction overrides, zero width), surrogate, private and unassigned characters; odd line ends.
_UNSEEN = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
_CODE = re.compile(r"`([^`\n]+)`")
_RESERVED = re.compile(r"(con|prn|aux|nul|com\d|lpt\d)(\..*)?$", re.IGNORECASE)
_STARTS_FORMULA = tuple("=+-@\t\r\n＝＋－＠")


def shown(text: Any, most: int = MAX_CHARS) -> str:
    r"""Return a text as people may see it: cut, without terminal colours, with unseen characters written out.

    >>> shown("\x1b[31mred\x1b[0m\x00 s\u202e01")
    'red\\x00 s\\u202e01'
    >>> shown("abcdefghij", 4)
    'ab ... (6 characters left out) ... ij'
    """
    return _written_out(_ANSI.sub("", _cut(str(text), most).replace("\r\n", "\n")))


def one_line(text: Any, most: int = MAX_NAME_CHARS) -> str:
    r"""Return a text as `shown` does, on one line, and with what would be colours written out too.

    So two names that differ look different.

    >>> one_line("a\nb"), one_line("\x1b[31ms01")
    ('a\\nb', '\\x1b[31ms01')
    """
    return _written_out(_cut(str(text), most)).replace("\n", "\\n").replace("\t", "\\t")


def code_marked(text: str) -> str:
    """Return a text as HTML: escaped, and what stands between backticks as code.

    >>> code_marked("`x < y` and 3")
    '<code>x &lt; y</code> and 3'
    """
    return _CODE.sub(r"<code>\1</code>", html.escape(text))


def plain(text: str) -> str:
    """Return a text without the backticks around code.

    >>> plain("`x` and 3")
    'x and 3'
    """
    return _CODE.sub(r"\1", text)


def cell(text: str) -> str:
    """Return a text that no spreadsheet takes for a formula: an apostrophe goes before what begins like one.

    What begins with an apostrophe gets one too, so that whoever reads the table back drops one apostrophe from every
    cell that begins with it and has the text as it was.

    >>> cell("=1+2"), cell("'s"), cell("s01")
    ("'=1+2", "''s", 's01')
    """
    return f"'{text}" if text.startswith((*_STARTS_FORMULA, "'")) else text


def file_names(names: Iterable[str]) -> dict[str, str]:
    """Return for each name a file name without ending: plain, short, no device, and alone even where case is one.

    A name that can stand as it is stays; any other, and those that differ in case only, get a few digits of their hash.

    >>> file_names(["s01", "../x"])
    {'s01': 's01', '../x': 'x-d6b96a97'}
    """
    wanted = {name: _plain(name) for name in names}
    folded = [name.casefold() for name, plain in wanted.items() if plain == name]
    found: dict[str, str] = {}
    taken: set[str] = set()
    # Names that stay as they are come first: nobody takes one by hashing to it.
    for name in sorted(wanted, key=lambda one: (wanted[one] != one, one)):
        plain = wanted[name]
        candidate = plain if plain == name and folded.count(name.casefold()) == 1 else _marked(plain, name)
        while candidate.casefold() in taken:
            candidate = _marked(plain, candidate + name)
        taken.add(candidate.casefold())
        found[name] = candidate
    return {name: found[name] for name in wanted}


def _cut(whole: str, most: int) -> str:
    if len(whole) <= most:
        return whole
    half = most // 2
    return f"{whole[:half]} ... ({len(whole) - 2 * half} characters left out) ... {whole[len(whole) - half :]}"


def _written_out(text: str) -> str:
    return "".join(_seen(one) for one in text)


def _plain(name: str) -> str:
    plain = re.sub(r"[^A-Za-z0-9._-]+", "_", name)[:MAX_FILE_NAME_CHARS].strip("._-")
    return f"_{plain}" if _RESERVED.match(plain) else plain or "student"


def _marked(plain: str, name: str) -> str:
    return f"{plain}-{hashlib.sha256(name.encode('utf-8', 'surrogatepass')).hexdigest()[:8]}"


def _seen(one: str) -> str:
    if one in "\n\t" or unicodedata.category(one) not in _UNSEEN:
        return one
    code = ord(one)
    if 0xDC80 <= code <= 0xDCFF:  # a byte of a file name that is no UTF-8, as os.fsdecode carries it
        code -= 0xDC00
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
