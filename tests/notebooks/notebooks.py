"""The three folders of notebooks, how they are stored, and kernels that run them."""

import pathlib
from collections.abc import Iterator
from contextlib import contextmanager

import nbformat
import psutil
from nbclient import NotebookClient

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
CHAPTERS = sorted((REPOSITORY / "notebooks").glob("*.ipynb"))
SOLUTIONS = sorted((REPOSITORY / "solutions").glob("*.ipynb"))
EXERCISES = sorted((REPOSITORY / "exercises").glob("*.ipynb"))

CELL_TIMEOUT_S = 240
ENDS_TIMEOUT_S = 60


def code_cells(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    """Its code cells, in order."""
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


@contextmanager
def kernel(notebook: nbformat.NotebookNode, path: pathlib.Path) -> Iterator[NotebookClient]:
    """A kernel in the notebook's folder; at the end nothing that it started may be left."""
    client = NotebookClient(
        notebook, timeout=CELL_TIMEOUT_S, kernel_name="python3", resources={"metadata": {"path": str(path.parent)}}
    )
    with client.setup_kernel():
        started = psutil.Process(client.km.provisioner.pid)
        yield client
        processes = [started, *started.children(recursive=True)]
    _, left = psutil.wait_procs(processes, timeout=ENDS_TIMEOUT_S)
    assert not left, "processes outlived the kernel that started them"
