"""Every notebook runs top to bottom in a real kernel, each cell twice; stored without outputs, with stable ids."""

import json
import pathlib
import re

import nbformat
import psutil
import pytest
from nbclient import NotebookClient

NOTEBOOKS = sorted((pathlib.Path(__file__).resolve().parents[2] / "notebooks").glob("*.ipynb"))
CELL_TIMEOUT_S = 240
ENDS_TIMEOUT_S = 60
FORBIDDEN = re.compile(r"input\(|get_ipython\(\)\.system|^\s*!|^\s*%pip", re.MULTILINE)

pytestmark = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def code_cells(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def test_stored_without_outputs_and_with_names_for_ids(path: pathlib.Path) -> None:
    notebook = nbformat.read(path, as_version=nbformat.NO_CONVERT)
    nbformat.validate(notebook)
    assert (notebook.nbformat, notebook.nbformat_minor) >= (4, 5)
    for cell in code_cells(notebook):
        assert cell.outputs == []
        assert cell.execution_count is None
        assert set(cell.metadata) <= {"tags"}
    ids = [cell.id for cell in notebook.cells]
    assert len(set(ids)) == len(ids)
    for name in ids:
        assert re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", name), f"{name} is no name a person gave"
        assert not re.fullmatch(r"[0-9a-f]{8}", name), f"{name} was made by a program"


def test_stored_as_jupyter_would_store_it(path: pathlib.Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert text == json.dumps(json.loads(text), indent=1, ensure_ascii=False, sort_keys=True) + "\n"


def test_says_what_it_needs_in_one_cell_and_has_no_shell_commands(path: pathlib.Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    tagged = [cell for cell in code_cells(notebook) if "parameters" in cell.metadata.get("tags", [])]
    assert len(tagged) == 1
    assert code_cells(notebook)[0] is tagged[0]
    for cell in code_cells(notebook):
        assert not FORBIDDEN.search(cell.source), cell.source


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_runs_top_to_bottom_with_every_cell_run_twice(path: pathlib.Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook, timeout=CELL_TIMEOUT_S, kernel_name="python3", resources={"metadata": {"path": str(path.parent)}}
    )
    with client.setup_kernel():
        for index, cell in enumerate(notebook.cells):
            if cell.cell_type == "code":
                for _ in range(2):
                    client.execute_cell(cell, index)  # raises CellExecutionError with the cell's traceback
                assert not [output for output in cell.outputs if output.output_type == "error"]
                assert len(json.dumps(cell.outputs)) < 2_000_000, "an output that would flood the notebook"
        processes = psutil.Process().children(recursive=True)
    _, left = psutil.wait_procs(processes, timeout=ENDS_TIMEOUT_S)
    assert not left, "processes outlived the kernel that started them"
