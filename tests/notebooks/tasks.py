"""Finds the cells where a lesson's reader writes code (three in a row) or guesses (two)."""

import ast
import re
import textwrap
from collections import Counter
from typing import NamedTuple

from tests.notebooks.pages import code, is_hidden, python

_GUESS = re.compile(r"guess(_\w+)? = None( *#.*)?")
_STUB_END = re.compile(r"raise NotImplementedError  # your (\d+) lines?$", re.M)
_CHECK = "# The check\n"
_ANSWER = re.compile(r"if not (\w+):\n")


class Task(NamedTuple):
    """A function or class that the reader writes.

    name: the first one that the stub defines
    stub, check, answer: indices of its cells in the notebook
    lines: how many lines the answer has that the stub hasn't, without blank lines and comments
    """

    name: str
    stub: int
    check: int
    answer: int
    lines: int


def tasks(notebook) -> tuple[list[Task], list[str]]:
    """Returns the well-formed tasks, and what is wrong with the others."""
    cells = [(k, cell) for k, cell in enumerate(notebook.cells) if cell.cell_type == "code"]
    kinds = "".join(map(_kind, (cell for _, cell in cells)))
    found, wrong = [], []
    for match in re.finditer(r"SCA|[SCA]", kinds):
        three = cells[match.start() : match.end()]
        if len(three) < 3:
            wrong.append(f"cell {three[0][0]}: a stub, its check and its answer must be three code cells in a row")
            continue
        indices, (stub, check, answer) = zip(*three, strict=True)
        wrong += [f"cell {indices[0]}: {problem}" for problem in _problems(stub, check, answer)]
        found.append(Task(next(iter(_defined(stub.source)), ""), *indices, _lines_to_write(stub, answer)))
    return found, wrong


def guesses(notebook) -> tuple[int, list[str]]:
    """Counts the guesses, and returns what is wrong with them: a hidden output belongs right below each, and nowhere else.

    A cell that only prints the answer hides its source, too.
    """
    cells, wrong = code(notebook), []
    for before, cell in zip([None, *cells], [*cells, None], strict=True):
        asked = before is not None and is_guess(before)
        hidden = cell is not None and cell.metadata.get("jupyter", {}).get("outputs_hidden", False)
        if asked and not hidden:
            wrong.append(f"{before.source}: the next code cell's output isn't hidden")
        elif asked and _first_line(cell) not in ("", "You guessed None"):
            wrong.append(
                f"{before.source}: JupyterLab shows the first line of a hidden output; print 'You guessed' and the guess"
            )
        elif asked and _only_prints(cell) and not (is_hidden(cell) and cell.source.startswith("# The answer\n")):
            wrong.append(f'{before.source}: the next code cell gives the answer away: hide it, under "# The answer"')
        elif hidden and not asked:
            wrong.append(f"{cell.source.splitlines()[0]}: the output is hidden, but there is no guess above it")
    return sum(map(is_guess, cells)), wrong


def _only_prints(cell) -> bool:
    return all(isinstance(node, ast.Expr) for node in ast.parse(python(cell.source)).body)


def _first_line(cell) -> str:
    """Returns the first line of a cell's first output, which JupyterLab shows of a hidden one; "" for a picture."""
    text = cell.outputs[0].get("text", "") if cell.get("outputs") else ""
    return text.partition("\n")[0]


def is_guess(cell) -> bool:
    """Whether the cell is where the reader puts a guess."""
    return cell.cell_type == "code" and _GUESS.fullmatch(cell.source.strip()) is not None


def answer_of(cell) -> str:
    """Returns the definitions of an answer cell as the reader would have written them into the stub."""
    return textwrap.dedent(_ANSWER.sub("", cell.source, count=1))


def _kind(cell) -> str:
    """Returns S for a stub, C for a check, A for an answer, and a dot for any other code cell."""
    tags = cell.metadata.get("tags", [])
    if "write" in tags:
        return "S"
    return "A" if "answer" in tags else "C" if "mr.attempt(" in cell.source else "."


def _problems(stub, check, answer) -> list[str]:
    lines, said = _lines_to_write(stub, answer), [int(number) for number in _STUB_END.findall(stub.source)]
    names, asked = _defined(stub.source), _ANSWER.match(answer.source)
    result = _result_of_check(check.source)
    rules = {
        "the stub must define a function or class": names,
        'the stub must end in "raise NotImplementedError  # your N lines"': re.search(rf"{_STUB_END.pattern}\Z", stub.source),
        f"the stub says {sum(said)} lines, but the answer has {lines} of its own": sum(said) == lines,
        "the check must assign the result of mr.attempt to a name": result,
        f'the answer must begin with "if not {result}:"': asked and asked[1] == result,
        f"the answer must define {', '.join(names)}": set(names) <= set(_defined(answer_of(answer))),
        "the check's source must be hidden": is_hidden(check),
        'the check must begin with "# The check", which JupyterLab shows of a hidden one': check.source.startswith(_CHECK),
        "the answer's source must be hidden": is_hidden(answer),
    }
    return [problem for problem, holds in rules.items() if not holds]


def _defined(source: str) -> list[str]:
    """Returns the names of the functions and classes that the source defines."""
    return [node.name for node in ast.parse(source).body if isinstance(node, ast.FunctionDef | ast.ClassDef)]


def _result_of_check(source: str) -> str:
    """Returns the name that a check cell gives to the result of mr.attempt, "" if it doesn't."""
    for node in ast.parse(python(source)).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and ast.unparse(node.value.func) == "mr.attempt":
            return ast.unparse(node.targets[0])
    return ""


def _lines_to_write(stub, answer) -> int:
    return (_statements(answer_of(answer)) - _statements(stub.source)).total()


def _statements(source: str) -> Counter[str]:
    stripped = (line.strip() for line in source.splitlines())
    return Counter(line for line in stripped if line and not line.startswith("#"))
