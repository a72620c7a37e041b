"""Twelve submissions for question 06.1: honest ones, and one for each way to trouble a grader."""

import copy
import json
import pathlib
import re

# What the grader must make of each: status and points of 06.1.
EXPECTED = {
    "s01": ("full", 10),
    "s02": ("partial", 5),
    "s03": ("timeout", 0),
    "s04": ("crashed", 0),
    "s05": ("timeout", 0),
    "s06": ("crashed", 0),
    "s07": ("error", 0),
    "s08": ("wrong", 0),
    "s09": ("full", 10),
    "s10": ("missing", 0),
    "s11": ("error", 0),
    "s12": ("error", 0),
}
WHAT = {
    "s01": "right",
    "s02": "one criterion missed",
    "s03": "infinite loop",
    "s04": "rank kills itself",
    "s05": "hang in a collective",
    "s06": "fork bomb",
    "s07": "10 GB allocation",
    "s08": "object that fakes equality",
    "s09": "right, cell twice",
    "s10": "cell deleted",
    "s11": "broken JSON",
    "s12": "reads the disk for answers",
}
CHAPTER = "06_ring_and_tree"

_HEAD = "def ring_all_reduce(x, group):\n"
# What replaces the body of the answer.
_BODIES = {
    "s03": "    while True:\n        x = x + 1\n",
    "s04": "    import os, signal\n    os.kill(os.getpid(), signal.SIGKILL)\n",
    "s05": "    if dist.get_rank(group) == 0:\n        return x\n    dist.all_reduce(x, group=group)\n    return x\n",
    "s06": "    import os\n    while True:\n        os.fork()\n",
    "s07": "    bytearray(10 * 10**9)\n    return x\n",
    "s08": "    return AlwaysEqual()\n",
    "s12": """    import pathlib
    import labkit
    found = pathlib.Path(labkit.__file__).parent.joinpath("checks", "ring_and_tree.py").read_text()
    namespace = {}
    exec(found, namespace)
    return namespace["RING"]
""",
}
_FAKE = """class AlwaysEqual:
    def __eq__(self, other):
        return True

    def __getattr__(self, name):
        return self
"""


def write(folder: pathlib.Path, repository: pathlib.Path) -> None:
    """Write the submissions: the first and the ninth as folders, the others as files."""
    solution = json.loads((repository / "solutions" / f"{CHAPTER}.ipynb").read_text(encoding="utf-8"))
    folder.mkdir(parents=True)
    for student in EXPECTED:
        text = json.dumps(_notebook(student, solution, repository))
        if student in ("s01", "s09"):
            path = folder / student / "homework" / f"{CHAPTER}.ipynb"
            path.parent.mkdir(parents=True)
        else:
            path = folder / f"{student}_{CHAPTER}.ipynb"
        path.write_text(text[: len(text) // 2] if student == "s11" else text, encoding="utf-8")


def _notebook(student: str, solution: dict, repository: pathlib.Path) -> dict:
    notebook = copy.deepcopy(solution)
    cells = notebook["cells"]
    place = next(at for at, cell in enumerate(cells) if cell["id"] == "q06-1")
    if student == "s02":
        path = repository / "tests" / "grade" / "wrong" / "06.1" / "gather_and_broadcast.py"
        cells[place]["source"] = re.sub(r"\A(# \w+: .*\n)+\n", "", path.read_text(encoding="utf-8"))
    elif student in _BODIES:
        cells[place]["source"] = _HEAD + _BODIES[student]
    if student == "s08":
        cells.insert(place, {**copy.deepcopy(cells[place]), "id": "own", "metadata": {}, "source": _FAKE})
    elif student == "s09":
        cells.insert(place + 1, copy.deepcopy(cells[place]))
    elif student == "s10":
        del cells[place]
    return notebook
