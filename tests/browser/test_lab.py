"""Every chapter in JupyterLab in a real browser: Run All, no unexpected error, and the explorer follows its controls."""

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook

pytestmark = [pytest.mark.browser, pytest.mark.timeout(300)]


def test_chapter_00_runs_and_its_explorer_follows(lab):
    with lab.open("00_start_here.ipynb") as notebook:
        notebook.run_all()
        assert [error.partition(":")[0] for error in notebook.errors()] == ["RankHung", "RankFailed"]
        explorer = notebook.explorer()
        link, size = explorer.controls()
        seen = [(explorer.picture(), explorer.status())]
        for act in (lambda: explorer.move(size), lambda: explorer.drag(size, 60), lambda: explorer.move(link)):
            act()
            seen.append((explorer.picture(), explorer.status()))
        notebook.screenshot("chapter_00_explorer")
        pictures, lines = zip(*seen, strict=True)
        assert len(set(pictures)) == len(set(lines)) == 4
        assert all("InfiniBand 400G" in line for line in lines[:3])
        assert "InfiniBand 200G" in lines[3]


PYTHON = {"kernelspec": {"name": "python3", "display_name": "Python 3"}}
ENDS_EARLY = [
    ("1 / 0", ["raises-exception"]),
    ("import sys; print('careful', file=sys.stderr)", []),
    ("import ipywidgets; out = ipywidgets.Output(); out.append_stderr('inside'); out", []),
    ("display({'application/vnd.jupyter.widget-view+json': {'model_id': 'gone', 'version_major': 2}}, raw=True)", []),
    ("undefined", []),
    ("'never'", []),
]


def test_what_goes_wrong_in_a_notebook_is_seen(lab):
    cells = [new_code_cell(source, metadata={"tags": tags}) for source, tags in ENDS_EARLY]
    nbformat.write(new_notebook(cells=cells, metadata=PYTHON), lab.folder / "wrong.ipynb")
    with lab.open("wrong.ipynb") as notebook:
        with pytest.raises(AssertionError, match=r"code cells \[6\] did not run"):
            notebook.run_all()
        kinds = [error.partition(":")[0] for error in notebook.errors()]
        assert kinds == ["ZeroDivisionError", "NameError", "stderr", "output widget", "view"]
