"""A tiny lesson and a tiny lab, well formed, for the tests of the tests."""

import nbformat
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from tests.notebooks.reading import minutes

_STUB = """def {name}(x):
    \"\"\"Returns the {name} of x over all ranks.\"\"\"
    x = x.clone()
    raise NotImplementedError  # your 2 lines
"""
_CHECK = """# The check
right_{name} = mr.attempt(
    lambda: world.run(lambda: {name}(torch.ones(3))),
    (lambda results: results[0].tolist() == [{value}] * 3, lambda results: f"rank 0 has {{results[0].tolist()}}."),
)
"""
_ANSWER = """if not right_{name}:

    def {name}(x):
        x = x.clone()
        # in place
        {call}
        return x
"""
TASKS = {  # name -> its call, and what it makes of ones on two ranks
    "total": ("dist.all_reduce(x)", 2.0),
    "largest": ("dist.all_reduce(x, op=dist.ReduceOp.MAX)", 1.0),
    "product": ("dist.all_reduce(x.mul_(2), op=dist.ReduceOp.PRODUCT)", 4.0),
}
MISTAKES = {
    "total": ("def total(x):\n    return x", "rank 0 has [1.0, 1.0, 1.0]"),
    "largest": ("def largest(x):\n    pass", "the check can't use what your code returned"),
    "product": ("def product(x):\n    dist.recv(x, 1 - dist.get_rank())", "deadlock"),
}


def lesson() -> nbformat.NotebookNode:
    """Returns a lesson with three tasks, a guess, seven pictures and an explorer."""
    pictures = [drawn("<Figure size 640x480 with 1 Axes>") for _ in range(7)]
    cells = [
        new_markdown_cell("# 03 A fake\n\n**You will** see. **Time:** about NN minutes."),
        new_code_cell("import torch\nimport torch.distributed as dist\n\nimport manyranks as mr\nfrom manyranks import show"),
        new_code_cell("world = mr.World(2)"),
        new_markdown_cell("## 1. Guess"),
        new_code_cell("guess = None"),
        new_code_cell('# The answer\nprint("four")', metadata={"jupyter": {"outputs_hidden": True, "source_hidden": True}}),
        new_markdown_cell("## 2. Write"),
        *(cell for name in TASKS for cell in task(name)),
        new_code_cell("world.run(lambda: total(torch.ones(1)).item())"),
        *pictures,
        new_markdown_cell("<details>\n<summary><b>1.</b> How many?</summary>\n\nTwo.\n</details>"),
        drawn("Explorer(...)"),
        new_markdown_cell("## 3. On real GPUs"),
        new_code_cell("world.close()"),
    ]
    found = new_notebook(cells=cells)
    cells[0].source = cells[0].source.replace("NN", f"{minutes(found):.0f}")
    return found


def lab() -> nbformat.NotebookNode:
    """Returns a lab with two sections that stand alone."""
    cells = [
        new_markdown_cell("# Lab 03: a fake"),
        new_code_cell("import math\n\nn = 4"),
        new_markdown_cell("## One"),
        new_code_cell("def root(x):\n    return math.sqrt(x * n)"),
        new_code_cell("root(2)"),
        new_markdown_cell("## Two"),
        new_code_cell("[k * n for k in range(3)]"),
    ]
    return new_notebook(cells=cells)


def task(name: str) -> list[nbformat.NotebookNode]:
    """Returns the three cells of a task: stub, check and answer."""
    call, value = TASKS[name]
    hidden = {"jupyter": {"source_hidden": True}}
    return [
        new_code_cell(_STUB.format(name=name).rstrip(), metadata={"tags": ["write"]}),
        new_code_cell(_CHECK.format(name=name, value=value).rstrip(), metadata=hidden),
        new_code_cell(_ANSWER.format(name=name, call=call).rstrip(), metadata={"tags": ["answer"], **hidden}),
    ]


def drawn(text: str) -> nbformat.NotebookNode:
    """Returns a cell that has a picture as its output."""
    output = new_output("display_data", data={"text/plain": text, "image/png": "iVBORw0KGgo="})
    return new_code_cell("torch.ones(1)", outputs=[output])
