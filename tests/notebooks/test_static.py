"""Chapters as web pages without a kernel, as `jupyter nbconvert --to html` makes them, and the code that they show."""

import ast

import nbformat
import pytest
from nbconvert import HTMLExporter

from tests.notebooks.pages import LABS, LESSONS, code, label


@pytest.mark.parametrize("path", [*LESSONS, *LABS], ids=label)
def test_an_explorer_is_a_picture_on_a_page_without_a_kernel(path):
    chapter = nbformat.read(path, 4)
    shown = [(cell, output.get("data", {})) for cell in chapter.cells for output in cell.get("outputs", [])]
    explorers = [(cell, bundle) for cell, bundle in shown if bundle.get("text/plain", "").startswith("Explorer(")]
    page, _ = HTMLExporter().from_notebook_node(nbformat.from_dict(chapter | {"cells": [cell for cell, _ in explorers]}))
    for _, bundle in explorers:
        assert f'src="data:image/png;base64,{bundle["image/png"].strip()}"' in page.replace("\n", "")


@pytest.mark.parametrize("path", [*LESSONS, *LABS], ids=label)
def test_the_code_on_a_page_is_the_library_s_of_today(path):
    scope = {}
    for cell in code(nbformat.read(path, 4)):
        lines = [line for line in cell.source.splitlines() if not line.startswith("%")]
        for step in ast.parse("\n".join(lines)).body:
            if isinstance(step, ast.Import | ast.ImportFrom):
                exec(ast.unparse(step), scope)
            elif isinstance(step, ast.Expr) and ast.unparse(step).startswith("show.source("):
                listing = eval(ast.unparse(step), scope)
                assert cell.outputs[-1]["data"]["text/html"] == listing._repr_html_(), f"execute it again: {cell.source}"
