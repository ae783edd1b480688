"""The form of lessons and labs, and that each of its rules can fail."""

import subprocess
import sys

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_output

from tests.conftest import matrix
from tests.notebooks import fakes, form, names, pages, reading
from tests.notebooks.execute import clean
from tests.notebooks.tasks import answer_of, tasks


@pytest.mark.parametrize("path", pages.LESSONS, ids=pages.label)
@pytest.mark.parametrize("rule", form.LESSON, ids=lambda rule: rule.__name__)
def test_a_lesson_keeps_the_rule(path, rule):
    assert rule(nbformat.read(path, 4)) == []


@pytest.mark.parametrize("path", pages.LABS, ids=pages.label)
@pytest.mark.parametrize("rule", form.LAB, ids=lambda rule: rule.__name__)
def test_a_lab_keeps_the_rule(path, rule):
    assert rule(nbformat.read(path, 4)) == []


@pytest.mark.parametrize(
    "path",
    matrix(
        [pages.NOTEBOOKS / "lab/11_kernels.ipynb", pages.NOTEBOOKS / "11_kernels.ipynb"],
        kept=[pages.NOTEBOOKS / "11_kernels.ipynb"],
    ),
    ids=pages.label,
)
def test_cells_without_the_tag_run_where_there_is_no_triton(path):
    cells = [cell.source for cell in pages.code(nbformat.read(path, 4)) if "triton" not in cell.metadata.get("tags", ())]
    assert len(cells) >= 8
    source = "\n".join(["import sys; sys.modules['triton'] = None", *cells])
    ran = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr


def test_every_lesson_has_a_lab():
    assert [path.name for path in pages.LABS] == [path.name for path in pages.LESSONS]


@pytest.mark.parametrize(("rules", "fake"), [(form.LESSON, fakes.lesson), (form.LAB, fakes.lab)], ids=["lesson", "lab"])
def test_the_fakes_keep_all_rules(rules, fake):
    assert [problem for rule in rules for problem in rule(fake())] == []


def add(*cells):
    return lambda notebook: notebook.cells.extend(cells)


def replace(old, new):
    def change(notebook):
        (cell,) = [cell for cell in notebook.cells if old in cell.source]
        cell.source = cell.source.replace(old, new)

    return change


def remove(part):
    def change(notebook):
        notebook.cells = [cell for cell in notebook.cells if part not in cell.source]

    return change


def unmark(part):
    def change(notebook):
        (cell,) = [cell for cell in notebook.cells if part in cell.source]
        cell.metadata.pop("jupyter")

    return change


def leak(notebook):
    """The hidden answer's first line says it."""
    (cell,) = [cell for cell in notebook.cells if 'print("four")' in cell.source]
    cell.outputs = [new_output("stream", text="four\nYou guessed None\n")]


FOLDED = new_markdown_cell("## Folded", metadata={"jp-MarkdownHeadingCollapsed": True})
BROKEN_LESSONS = [
    (form.it_is_short, add(new_markdown_cell("word " * 2000)), "words of markdown"),
    (form.it_is_short, add(new_code_cell("x = 1\n" * 181)), "visible lines of code"),
    (form.it_is_short, add(*[new_markdown_cell("## More")] * 5), "8 sections"),
    (form.it_is_short, add(*[fakes.drawn("<Figure")] * 4), "11 pictures"),
    (form.it_is_short, remove("torch.ones(1)"), "0 pictures"),
    (form.only_answers_are_folded, add(FOLDED), "folded: ## Folded"),
    (form.only_answers_are_folded, add(new_markdown_cell("<details>\nmore</details>")), "folded: <details>"),
    (form.its_answers_hide, add(new_markdown_cell("Which **fit?** (Two.)")), "in sight: Which **fit?** (Two.)"),
    (form.its_answers_hide, replace("<b>1.</b> How", "How"), "a question without a folded answer: <summary>How many?"),
    (form.the_reader_writes, remove("product"), "2 tasks"),
    (form.the_reader_writes, remove("right_total = "), "must be three code cells in a row"),
    (form.the_reader_writes, replace("right_total = mr", "mr"), "must assign the result"),
    (form.the_reader_writes, replace("if not right_total:", "if not right:"), 'must begin with "if not right_total:"'),
    (form.the_reader_writes, replace("    def total(x):", "    def sum_up(x):"), "the answer must define total"),
    (form.the_reader_writes, unmark("right_total = mr"), "the check's source must be hidden"),
    (form.the_reader_writes, replace("# The check\nright_total", "right_total"), 'must begin with "# The check"'),
    (form.the_reader_writes, unmark("if not right_total:"), "the answer's source must be hidden"),
    (form.the_reader_writes, unmark('print("four")'), "output isn't hidden"),
    (form.the_reader_writes, replace("# The answer\n", ""), "gives the answer away"),
    (form.the_reader_writes, remove("guess = None"), "no guess above it"),
    (form.the_reader_writes, leak, "shows the first line of a hidden output"),
    (form.the_reader_writes, replace("dist.all_reduce(x)\n", "dist.all_reduce(x)\n        x = +x\n"), "the answer has 3"),
    (form.it_stands_alone, add(new_code_cell("import pandas")), "imports pandas"),
    (form.it_stands_alone, add(new_code_cell("later()"), new_code_cell("def later(): ...")), "later isn't defined"),
    (form.it_stands_alone, remove("world = mr.World(2)"), "world isn't defined"),
    (form.it_says_its_minutes, replace("about", "roughly"), "the opening must say"),
    (form.it_says_its_minutes, replace("about ", "about 1"), "and the estimate is"),
    (form.it_says_its_minutes, replace("about ", "about 1"), "more than 70"),
    (form.it_ends_on_real_gpus, add(new_markdown_cell("## More"), new_markdown_cell("## And more")), 'no "On real GPUs"'),
]
BROKEN_LABS = [
    (form.only_answers_are_folded, add(FOLDED), "folded: ## Folded"),
    (form.its_setup_imports, add(new_code_cell("import sys")), "import sys"),
    (form.its_setup_imports, replace("import math", ""), "no imports"),
    (form.its_sections_stand_alone, add(new_markdown_cell("## Three"), new_code_cell("root(3)")), "## Three: root"),
    (form.its_sections_stand_alone, replace("n = 4", ""), "## Two: n"),
]


@pytest.mark.parametrize(("rule", "breaks", "said"), BROKEN_LESSONS, ids=[said for *_, said in BROKEN_LESSONS])
def test_a_lesson_that_breaks_a_rule_is_found(rule, breaks, said):
    breaks(notebook := fakes.lesson())
    assert said in "\n".join(rule(notebook))


@pytest.mark.parametrize(("rule", "breaks", "said"), BROKEN_LABS, ids=[said for *_, said in BROKEN_LABS])
def test_a_lab_that_breaks_a_rule_is_found(rule, breaks, said):
    breaks(notebook := fakes.lab())
    assert said in "\n".join(rule(notebook))


def test_a_task_s_lines_are_those_that_the_stub_does_not_give():
    found, _ = tasks(lesson := fakes.lesson())
    assert [(task.name, task.lines) for task in found] == [("total", 2), ("largest", 2), ("product", 2)]
    assert answer_of(lesson.cells[found[0].answer]).strip().startswith("def total(x):\n    x = x.clone()\n")


def test_minutes_are_counted_as_the_estimate_says():
    before, lesson = reading.minutes(fakes.lesson()), fakes.lesson()
    lesson.cells += [new_markdown_cell("word " * 110 + "[two words](notebooks/link.ipynb) — `x`\n```\ntwo more\n```")]
    lesson.cells += [new_code_cell("x = 1\n\n" * 8), fakes.drawn("<Figure"), fakes.drawn("Explorer(")]
    hidden = new_code_cell("x = 1\n" * 80, metadata={"jupyter": {"source_hidden": True}})
    lesson.cells += [hidden, new_code_cell("guess_2 = None  # how many?"), *fakes.task("total")]
    code = 8 + 1 + 1 + 0 + 1 + 4
    assert reading.minutes(lesson) - before == pytest.approx(118 / 110 + code / 8 + 1 / 2 + 5 + 1 + 3)


def test_sections_of_a_lesson_add_up_to_its_minutes():
    found = reading.sections(lesson := fakes.lesson())
    assert [section.heading for section in found] == ["", "## 1. Guess", "## 2. Write", "## 3. On real GPUs"]
    assert sum(section.minutes for section in found) == reading.minutes(lesson)


def test_executing_keeps_what_is_hidden_and_tags():
    cell = new_code_cell("x", metadata={"jupyter": {"source_hidden": True, "other": 1}, "tags": ["answer"], "trusted": True})
    lesson = nbformat.v4.new_notebook(cells=[cell, new_code_cell("y", metadata={"jupyter": {"outputs_hidden": False}})])
    kept = [dict(cell.metadata) for cell in clean(lesson).cells]
    assert kept == [{"jupyter": {"source_hidden": True}, "tags": ["answer"]}, {}]


@pytest.mark.parametrize(
    ("sources", "missing"),
    [
        (["x", "x = 1"], ["x"]),
        (["%load_ext manyranks\nx = [k for k in range(3) if k]\nk"], ["k"]),
        (["def f(a, *b, c=d, **e):\n    return a, b, c, e, g", "g = 1"], ["d"]),
        (["def f():\n    return g"], ["g"]),
        (["f = lambda x: x + y", "y = 1"], []),
        (["for k in range(3):\n    total = k\ntotal += 1\nother += 1"], ["other"]),
        (["class A(B):\n    x = 1\n    y = x\n    def f(self):\n        return super().f(), z"], ["B", "z"]),
        (["with open('a') as file, open('b') as (left, right):\n    file, left, right"], []),
        (["try:\n    pass\nexcept ValueError as error:\n    error"], []),
        (["%%ranks --measure m\nrank, torch, dist, x", "m"], ["x"]),
        (["world = 1\nworld.set(x=2)", "%%ranks\nx"], []),
        (["import a.b, c as d\nfrom e import f\na, d, f, c"], ["c"]),
        (["if (n := 3) > 2:\n    n\nawait n"], []),
    ],
)
def test_names_are_followed_as_the_cells_run(sources, missing):
    assert names.undefined(sources) == missing
