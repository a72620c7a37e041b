"""Text -> the object of a configuration, as DeepSpeed's own reader takes it: with comments and trailing commas."""

import json
from collections import Counter

from labkit.configuration.finding import Finding, mistake, note
from labkit.errors import PlanError
from labkit.spec.checks import shown

__all__ = ["MOST_CHARACTERS", "parse"]

MOST_CHARACTERS = 2_000_000


def parse(text: str) -> tuple[dict[str, object], list[Finding]]:
    r"""Read a configuration.

    Raises:
        PlanError: no JSON object, with the line where reading ended.

    >>> parse('{"a": 1, // one\n}')[0]
    {'a': 1}
    >>> parse('{"a": True}')
    Traceback (most recent call last):
        ...
    labkit.errors.PlanError: line 1, column 7, near 'True}': that is Python, and JSON writes true. Write true.
    """
    text = text.removeprefix("\ufeff")
    if len(text) > MOST_CHARACTERS:
        raise PlanError(
            f"{len(text):,} characters: a configuration has at most {MOST_CHARACTERS:,}. Give another file."
        )
    if not text.strip():
        raise PlanError("the text is empty: a configuration is a JSON object. Write at least {}.")
    reader = _Reader()
    try:
        found = reader.read(text)
    except json.JSONDecodeError:
        plain, was_changed = _without_comments(text)
        try:
            found = reader.read(plain)
        except json.JSONDecodeError as error:
            raise PlanError(_complaint(text, plain, error)) from None
        if was_changed:
            reader.findings.append(_RELAXED)
    if not isinstance(found, dict):
        kind = "a list" if isinstance(found, list) else shown(found)
        raise PlanError(f"the text is {kind}: a configuration is a JSON object. Put it between {{ and }}.")
    return found, reader.findings


_RELAXED = note(
    "",
    "the file has comments or trailing commas",
    "DeepSpeed reads files as Hjson and takes both, while Hugging Face Trainer, Accelerate and json.load take neither",
    "Take them out for those.",
)


class _Reader:
    """Reads once; keeps what the text says twice."""

    def __init__(self) -> None:
        self.findings: list[Finding] = []

    def read(self, text: str) -> object:
        self.findings.clear()
        try:
            return json.loads(text, object_pairs_hook=self._object)
        except RecursionError:
            raise PlanError("the text is nested too deeply: a configuration has at most four levels.") from None
        except json.JSONDecodeError:
            raise
        except ValueError as error:  # an integer of more digits than Python turns into one
            raise PlanError(f"a number cannot be read: {str(error)[:80]}. Write it shorter.") from None

    def _object(self, pairs: list[tuple[str, object]]) -> dict[str, object]:
        for name, times in Counter(name for name, _ in pairs).items():
            if times > 1:
                values = [shown(value) for key, value in pairs if key == name]
                self.findings.append(
                    mistake(
                        name[:80],
                        f"{shown(name)} stands {times} times, with {' and '.join(values[:3])}",
                        "DeepSpeed refuses a file with duplicate keys, and json.load keeps only the last",
                        "Keep one of them.",
                        "deepspeed/runtime/config_utils.py dict_raise_error_on_duplicate_keys",
                    )
                )
        return dict(pairs)


def _without_comments(text: str) -> tuple[str, bool]:
    """Blank out comments and trailing commas; positions stay."""
    out = list(text)
    index, comma, size = 0, -1, len(text)
    while index < size:
        char = text[index]
        if char == '"':
            index, comma = _string_end(text, index), -1
            continue
        end = _comment_end(text, index)
        if end > index:
            out[index:end] = [one if one == "\n" else " " for one in text[index:end]]
            index = end
            continue
        if char in "}]" and comma >= 0:
            out[comma] = " "
        if not char.isspace():
            comma = index if char == "," else -1
        index += 1
    plain = "".join(out)
    return plain, plain != text


def _string_end(text: str, start: int) -> int:
    index = start + 1
    while index < len(text) and text[index] not in '"\n':
        index += 2 if text[index] == "\\" else 1
    return min(index + 1, len(text))


def _comment_end(text: str, start: int) -> int:
    if text[start] == "#" or text.startswith("//", start):
        end = text.find("\n", start)
        return len(text) if end < 0 else end
    if text.startswith("/*", start):
        end = text.find("*/", start + 2)
        return len(text) if end < 0 else end + 2
    return start


def _complaint(text: str, plain: str, error: json.JSONDecodeError) -> str:
    rest = text[error.pos : error.pos + 24].split("\n")[0].rstrip()
    where = f"line {error.lineno}, column {error.colno}"
    if error.pos >= len(plain.rstrip()):
        return f"{where}: the text ends too early, a brace or a quote is not closed. Close what is open."
    near = f"{where}, near {shown(rest)}"
    if rest.startswith("'"):
        name = rest[1:].split("'")[0]
        return f"{near}: JSON puts names in double quotes. Write \"{name}\" instead of '{name}'."
    for word, meant in (("True", "true"), ("False", "false"), ("None", "null")):
        if rest.startswith(word):
            return f"{near}: that is Python, and JSON writes {meant}. Write {meant}."
    if "delimiter" in error.msg:
        return f"{near}: a comma or a colon is missing before it. Put it there."
    if "property name" in error.msg:
        return f"{near}: a name in double quotes comes here. Put quotes around it."
    if "Extra data" in error.msg:
        return f"{near}: something stands after the object. Keep one object in the file."
    return f"{near}: this is no JSON ({error.msg[:60]}). Correct it there."
