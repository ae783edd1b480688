"""Docstrings begin with a verb, "Returns …", or with a noun phrase that stands alone, "A pipe …"; not with a fragment."""

import ast
from pathlib import Path

import pytest

LIB = Path(__file__).parents[2] / "lib" / "manyranks"
PACKAGES = ("", "given", "grade", "measure", "small", "training")  # "": the files beside the packages
WORDS = "what of whether as one by for who whom whose which in on at with without from to where how when why that if no none so"
WORDS += " and also like until while after before beside between per"


@pytest.mark.parametrize("package", PACKAGES)
def test_no_docstring_begins_with_a_fragment(package):
    paths = sorted((LIB / package).rglob("*.py") if package else LIB.glob("*.py"))
    assert paths
    assert [f"{path.relative_to(LIB)}:{found}" for path in paths for found in fragments(path.read_text())] == []


def test_the_check_sees_fragments_wherever_a_docstring_stands():
    source = '''"""What it is."""
class One:
    """One-dimensional."""
    @property
    async def a(self):
        """Of: all."""
    def b(self):
        """

        "For example."
        """
        def c():
            """Inside, all is quiet."""
'''
    assert fragments(source) == ["1 What it is.", "6 Of: all.", '8 "For example."']


def fragments(source: str) -> list[str]:
    """Lists the docstrings whose first word is a fragment's, each with its line."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, kinds)]
    said = sorted((node.body[0].lineno, text) for node in nodes if (text := ast.get_docstring(node)))
    return [f"{line} {text.splitlines()[0]}" for line, text in said if first_word(text) in WORDS.split()]


def first_word(text: str) -> str:
    return text.split()[0].strip(".,:;!?()[]\"'`“”…").lower()
