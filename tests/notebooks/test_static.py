"""Chapters as web pages without a kernel, as `jupyter nbconvert --to html` makes them."""

import nbformat
import pytest
from nbconvert import HTMLExporter

from tests.notebooks.pages import LABS, LESSONS, label


@pytest.mark.parametrize("path", [*LESSONS, *LABS], ids=label)
def test_an_explorer_is_a_picture_on_a_page_without_a_kernel(path):
    chapter = nbformat.read(path, 4)
    shown = [(cell, output.get("data", {})) for cell in chapter.cells for output in cell.get("outputs", [])]
    explorers = [(cell, bundle) for cell, bundle in shown if bundle.get("text/plain", "").startswith("Explorer(")]
    page, _ = HTMLExporter().from_notebook_node(nbformat.from_dict(chapter | {"cells": [cell for cell, _ in explorers]}))
    for _, bundle in explorers:
        assert f'src="data:image/png;base64,{bundle["image/png"].strip()}"' in page.replace("\n", "")
