"""Executes notebooks in place, as `make notebooks` does, and removes metadata that changes from run to run."""

import sys
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from traitlets.config import Config

_KEPT = {"kernelspec": {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}}
_OF_CELLS = ("tags", "jp-MarkdownHeadingCollapsed", "jupyter")
_HIDDEN = ("source_hidden", "outputs_hidden")
_LANGUAGE = {"language_info": {"name": "python"}}


def execute(notebook: nbformat.NotebookNode, folder: Path) -> nbformat.NotebookNode:
    """Runs every cell in a fresh kernel; raises what a cell raises that is not tagged raises-exception."""
    run(notebook, folder)
    return clean(notebook)


def run(notebook: nbformat.NotebookNode, folder: Path, allow_errors: bool = False) -> None:
    """Runs every cell in a fresh kernel."""
    with Kernel(allow_errors=allow_errors) as kernel:
        kernel.run(notebook, folder)


class Kernel:
    """Runs notebooks one after the other in one kernel, which starts with the first of them and imports torch once.

    Each finds no names of those before it. Its sockets are files: of two kernels that start at once, one may take the other's
    port. allow_errors: whether cells may raise
    """

    def __init__(self, allow_errors: bool = False):
        self._sockets = tempfile.TemporaryDirectory()
        config = Config(KernelManager={"transport": "ipc", "ip": f"{self._sockets.name}/kernel"})
        options = {"timeout": 120, "kernel_name": "python3", "allow_errors": allow_errors}
        self._client = NotebookClient(nbformat.v4.new_notebook(), config=config, **options)

    def run(self, notebook: nbformat.NotebookNode, folder: Path) -> None:
        """Runs every cell; the kernel ends when one raises."""
        try:
            if self._client.km is not None:
                anew = f"import os\nos.chdir({str(folder)!r})\n%reset -f"
                self._execute(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(anew)]))
            self._client.resources = {"metadata": {"path": str(folder)}}
            self._execute(notebook)
        except BaseException:
            self._end()
            raise

    def _execute(self, notebook: nbformat.NotebookNode) -> None:
        self._client.nb = notebook
        self._client.execute(cleanup_kc=False)

    def _end(self) -> None:
        if self._client.km is not None:
            self._client._cleanup_kernel()
            self._client.km = None

    def __enter__(self) -> "Kernel":
        return self

    def __exit__(self, *_) -> None:
        self._end()
        self._sockets.cleanup()


def clean(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """Removes times, widget state, colors of tracebacks and the split of a stream into pieces."""
    notebook.metadata = _KEPT | _LANGUAGE
    for cell in notebook.cells:
        if hidden := cell.metadata.pop("jupyter", None):
            cell.metadata["jupyter"] = {name: True for name in _HIDDEN if hidden.get(name)}
        cell.metadata = {name: cell.metadata[name] for name in _OF_CELLS if cell.metadata.get(name)}
        if cell.cell_type == "code":
            cell.outputs = _joined(cell.outputs)
    return notebook


def _joined(outputs: list) -> list:
    joined: list = []
    for output in outputs:
        output.pop("transient", None)
        if joined and output.output_type == "stream" == joined[-1].output_type and output.name == joined[-1].name:
            joined[-1].text += output.text
        else:
            joined.append(output)
    return joined


def main(paths: list[str]) -> None:
    for path in map(Path, paths):
        notebook = execute(nbformat.read(path, 4), path.parent)
        nbformat.write(notebook, path)
        print(f"{path}: {sum(cell.cell_type == 'code' for cell in notebook.cells)} cells executed")


if __name__ == "__main__":
    main(sys.argv[1:])
