"""The chapters' cells by NCCL's rules (tests/strict.py), where these can be kept at all: `make test-all`."""

import nbformat
import pytest

from tests.conftest import INSTALL, ROOT
from tests.notebooks.execute import run

# Cells that can't run so, by notebook: PyTorch's own wrappers wait in C++, which the transport doesn't see; a run without
# numbers asks for NCCL itself; NCCL has no receive from any rank; and 05 shows sends that nobody waits for, which would hang on
# NCCL, and says so. In lab/10 a pipeline with ZeRO-3 is measured: there a recorder's wait doesn't find the transport's work.
# Lab 12 gives a copy's messages a tag of their own, and stages a hang.
CANNOT = {
    "05_pipeline": {"lesson-034"},
    "lab/02_data_parallel": {"c0ce288d", "e445c7f6"},
    "lab/03_zero": {"lab-155"},
    "lab/05_pipeline": {"lab-104", "lab-106"},
    "lab/06_tensor": {"lab-021", "lab-089", "lab-090", "lab-095", "lab-096"},
    "lab/08_expert": {"lab-078", "lab-079", "lab-080", "lab-089", "lab-097"},
    "lab/10_nd_parallel": {"lab-139"},
    "lab/12_failures": {"5080d97e", "c594fc8d", "efab2cf5", "effed5a2"},
}
NOTEBOOKS = sorted((ROOT / "notebooks").glob("[0-9]*.ipynb")) + sorted((ROOT / "notebooks" / "lab").glob("*.ipynb"))
NOTEBOOKS.append(ROOT / "notebooks" / "your_own_model.ipynb")


@pytest.mark.whole
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "path", NOTEBOOKS, ids=lambda path: path.stem if path.parent.name == "notebooks" else f"lab/{path.stem}"
)
def test_a_chapter_runs_by_nccl_s_rules(path, tmp_path, monkeypatch, request):
    profile = tmp_path / "profile_default" / "startup"
    profile.mkdir(parents=True)
    (profile / "strict.py").write_text(
        f"import sys; sys.path[:0] = {[str(ROOT / 'lib')]!r}; from manyranks.world import local; sys.path.pop(0)\n"
        f"local._START = local._START.replace('; serve(', {INSTALL!r})\n"
    )
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    notebook = nbformat.read(path, 4)
    stored = {cell.id for cell in notebook.cells if _raised(cell)}
    run(notebook, path.parent, allow_errors=True)
    raised = {cell.id: _raised(cell) for cell in notebook.cells if _raised(cell) and cell.id not in stored}
    name = request.node.callspec.id
    assert raised.keys() == CANNOT.get(name, set()), raised


def _raised(cell: nbformat.NotebookNode) -> str:
    return next((f"{o.ename}: {o.evalue}" for o in cell.get("outputs", ()) if o.output_type == "error"), "")
