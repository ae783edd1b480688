"""nbgrader steps: checks are judged apart from what learners wrote, and a cell without a number of points is worth none.

A cell that asks a grader of this library is judged by grade.apart, whatever the learner's own kernel would have said of it.
Only where a teacher has added test cells of another form does the notebook run in a kernel, as nbgrader has it.

A separate process, with limits on time and memory, reads a submission and writes it anew, with nothing but cells and
their names. A file that nbgrader would stumble over is cleaned there, or ends that process: the next student is graded
all the same. nbgrader itself gives full marks to a test cell without output, or with one that is no number ≥ 0 (its
issue 427, and `determine_grade` in nbgrader/utils.py), and drops a submission whose kernel dies. nbgrader_config.py
puts these steps in place.
"""

import re
from contextlib import suppress
from functools import cache, wraps
from glob import glob
from pathlib import Path

import nbformat
from nbclient.exceptions import CellTimeoutError, DeadKernelError
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output, new_raw_cell
from nbgrader import utils
from nbgrader.api import Gradebook, MissingEntry, SubmittedNotebook
from nbgrader.converters import Autograde, BaseConverter, GenerateFeedback, NbGraderException
from nbgrader.nbgraderformat import MetadataValidator
from nbgrader.plugins import CsvExportPlugin
from nbgrader.preprocessors import Execute, NbGraderPreprocessor, OverwriteCells, SaveAutoGrades
from nbgrader.preprocessors.execute import UnresponsiveKernelError
from traitlets import Bool
from traitlets.log import get_logger

from manyranks.grade import apart, submission
from manyranks.report import NOT_JUDGED
from manyranks.world.strangers.scratch import TEXT, as_it_is, in_plain_letters, refused, upright, within_limits
from manyranks.world.strangers.trouble import printable

_MOST, _CELLS, _CODE = 200, 1000, 200_000  # cells with a name of nbgrader's; all cells, and letters, of a notebook
_PLAIN = re.compile(r"\w[\w.@'-]*( [\w.@'-]+)*/\w[\w.@'-]*( [\w.@'-]+)*")  # student and exercise
_ID = re.compile(r"[\w.-]{1,100}")  # of a cell
_MISSED = "manyranks not judged"  # of an output
_NEW = {"code": new_code_cell, "markdown": new_markdown_cell, "raw": new_raw_cell}


class ExecuteWhatRuns(Execute):
    """Executes as nbgrader does, but keeps what ran when the kernel dies or answers no more, and starts it twice if need be."""

    def preprocess(self, nb: NotebookNode, resources, km=None):
        self._late = 0
        try:
            return super().preprocess(nb, resources, km)
        except (DeadKernelError, CellTimeoutError, UnresponsiveKernelError) as error:
            self.log.warning("the rest of the notebook did not run: %s", error)
            return nb, resources

    def start_new_kernel_client(self):
        with suppress(RuntimeError):  # it ended before any cell: another program may have taken its port meanwhile
            return super().start_new_kernel_client()
        self.km = self.create_kernel_manager()
        self.start_new_kernel()
        return super().start_new_kernel_client()

    def on_cell_executed(self, **kwargs) -> None:
        super().on_cell_executed(**kwargs)
        late = kwargs["execute_reply"]["content"].get("ename") == "CellTimeoutError"
        self._late = self._late + 1 if late else 0
        if self._late >= 2:  # cells in a row
            raise UnresponsiveKernelError("the kernel does not answer")


class JudgeApart(ExecuteWhatRuns):
    """Checks by grade.apart; a kernel for the other test cells, if there are any."""

    fewer_fences = Bool(False, help="judge as root, or where the system has no fences").tag(config=True)

    def preprocess(self, nb: NotebookNode, resources, km=None):
        asked = [cell for cell in nb.cells if submission.is_check(cell)]
        if not all(submission.is_check(cell) for cell in nb.cells if _is_test(cell)):
            nb, resources = super().preprocess(nb, resources, km)
        for cell in asked:
            cell.outputs = []  # what the kernel says of it counts for nothing
        missed = ""
        try:
            for judged in _judge(self.fewer_fences).judged(lambda: nb):
                missed = missed or judged.missed
                nb.cells[judged.index].outputs = outputs(judged)
        except apart.Ended as error:
            self.log.warning("%s: the remaining checks get no points", error)
            for cell in asked:
                cell.outputs = cell.outputs or [_no_result(f"{error}")]
        except apart.NotJudged as error:
            missed = f"{error}"
            for cell in asked:
                cell.outputs = cell.outputs or [_not_judged(missed)]
        if missed:
            self.log.error("NOT JUDGED, and that is nobody's fault: autograde it again, without --force (%s)", missed)
        return nb, resources


@cache
def _judge(fewer_fences: bool) -> apart.Judge:
    """Starts the judge, one a process: it keeps what is right for the next submission."""
    return apart.Judge(fewer_fences).__enter__()


def _not_judged(why: str) -> NotebookNode:
    """Makes what a check shows that nobody could judge."""
    return new_output("display_data", data={"text/plain": f"{NOT_JUDGED}: {why}"}, metadata={_MISSED: True})


def _no_result(why: str) -> NotebookNode:
    """Makes what a test cell shows that has no points."""
    return new_output("error", ename="NoResult", evalue=f"no points: {why}", traceback=[f"NoResult: no points: {why}"])


def is_not_judged(cell: NotebookNode) -> bool:
    """Returns whether the cell's check was not judged: then it has neither points nor none."""
    return submission.is_check(cell) and any(_MISSED in output.get("metadata", {}) for output in cell.outputs)


def outputs(judged: apart.Judged) -> list[NotebookNode]:
    """Makes what the cell shows: the report, whose text is the points, as nbgrader reads them."""
    if judged.missed:
        return [_not_judged(judged.missed)]
    html = upright(f"<div class='tex2jax_ignore'>{judged.report._repr_html_()}</div>")  # its words may look like formulas
    return [new_output("execute_result", data={"text/html": html, "text/plain": f"{judged.points:g}"}, execution_count=1)]


class Tidied(NbGraderPreprocessor):
    """Writes a submission anew: of each cell its kind, its source and its name. The last cell of a name keeps it.

    nbgrader leaves an empty entry in a cell that is there twice, takes it for an old version's, and grades nobody after it.
    """

    def preprocess(self, nb: NotebookNode, resources):
        seen, cells, left = set(), [], _CODE
        if len(nb.cells) > _CELLS or sum(len(cell.source) for cell in nb.cells if cell.cell_type == "code") > _CODE:
            raise ValueError(f"it has more than {_CELLS:,} cells, or more than {_CODE:,} characters of code")
        for cell in reversed(nb.cells):
            told, name = cell.metadata.get("nbgrader"), submission.grade_id(cell)
            text = f"{cell.source}".encode(errors="backslashreplace").decode()  # half a letter cannot be written
            text = text[: None if cell.cell_type == "code" else min(TEXT, left)]  # pictures may be in a text
            if cell.cell_type != "code":
                left -= len(text)
            cells.insert(0, _NEW[cell.cell_type](text))
            if _ID.fullmatch(name) and name not in seen and len(seen) < _MOST:
                seen.add(name)
                kinds = {kind: bool(told.get(kind)) for kind in ("grade", "solution", "locked", "task")}
                kinds |= {"grade_id": name, "schema_version": MetadataValidator.schema_version}
                cells[0].metadata.nbgrader = NotebookNode(kinds)
        return new_notebook(cells=cells), resources


def in_a_process_of_its_own(convert):
    """Runs in a process what nbgrader does before it judges a notebook, and for feedback. Raises as within_limits does."""

    @wraps(convert)
    def limited(self, filename: str) -> None:
        if not getattr(self, "_sanitizing", True):
            return convert(self, filename)
        within_limits(lambda: convert(self, filename))
        told = self.init_single_notebook_resources(filename)["nbgrader"]
        self.writer.build_directory = self._format_dest(told["assignment"], told["student"])  # where it has been written

    return limited


def regular_files_only(start):
    """Looks at a submission before nbgrader opens it: raises ValueError where it has links, devices, pipes or far too much.

    start: Autograde.init_destination, which reads the time of a submission.
    """

    @wraps(start)
    def checked(self, assignment_id: str, student_id: str) -> bool:
        graded_now = True
        try:
            if why := refused(Path(self._format_source(assignment_id, student_id))):
                raise ValueError(why)
            if _cut_off(judged := Path(self._format_dest(assignment_id, student_id))):
                utils.rmtree(f"{judged}")
            graded_now = start(self, assignment_id, student_id)
        finally:
            if graded_now:
                _without_points(self, assignment_id, student_id)
        return graded_now

    return checked


def _cut_off(folder: Path) -> bool:
    """Returns whether a check here has no result yet, perhaps because nbgrader was ended: then all are judged anew."""
    cells = (cell for path in folder.glob("*.ipynb") for cell in nbformat.read(path, 4).cells if _is_test(cell))
    return any(not cell.outputs or is_not_judged(cell) for cell in cells)


def _is_test(cell: NotebookNode) -> bool:
    return cell.cell_type == "code" and utils.is_grade(cell) and not utils.is_solution(cell)


def with_names_of_one_line(start):
    """Leaves out names that nbgrader takes for patterns, or for columns of its table; gives no points where no notebook is."""

    @wraps(start)
    def listed(self) -> None:
        for log in (self.log, get_logger()):
            log.addFilter(in_plain_letters)
        self.log.info("limits on learners' code here: %s", ", ".join(apart.fences()))
        if lacking := apart.lacks():
            fewer = JudgeApart(parent=self).fewer_fences
            follows = "" if fewer else f", and nobody is graded. {apart.IN_SPITE}"
            self.log.error("%s: learners' code could do harm here%s", lacking, follows)
            if not fewer:
                raise NbGraderException(lacking)
        try:
            start(self)
        finally:
            for folder in glob(self._format_source(self.coursedir.assignment_id, self.coursedir.student_id)):
                if not _PLAIN.fullmatch(last := "/".join(Path(folder).parts[-2:])) or printable(last) != last:
                    self.log.error("%s is left out: a name has letters, digits, . _ @ - ' and single spaces", printable(folder))
                    self.assignments.pop(folder, None)
                elif folder not in self.assignments and self.coursedir.notebook_id == "*":
                    without_a_notebook(self, folder)

    def without_a_notebook(self, folder: str) -> None:
        path = self._format_source("(?P<exercise>.*)", "(?P<student>.*)", escape=True)
        whose = re.fullmatch(path, folder).groupdict()
        if whose["student"] not in self.coursedir.student_id_exclude.split(","):
            self.log.error("%s has no notebook that can be graded, and no points", folder)
            with suppress(FileNotFoundError):
                utils.rmtree(self._format_dest(whose["exercise"], whose["student"]))
            _without_points(self, whose["exercise"], whose["student"])

    return listed


def _without_points(self: Autograde, assignment_id: str, student_id: str) -> None:
    """Points of an earlier submission are none of this one's, whatever becomes of it."""
    with suppress(MissingEntry), Gradebook(self.coursedir.db_url, self.coursedir.course_id) as book:
        for notebook in book.find_submission(assignment_id, student_id).notebooks:
            for grade in notebook.grades:
                grade.auto_score = 0
        book.db.commit()


class RemovedChecksLast(OverwriteCells):
    """Puts back removed checks at the end, for nbgrader stops where a text comes before. Learners' texts show as they are.

    Code that is given runs as it was handed in: it decides nothing, and the learner's own checks ran it.
    """

    def preprocess_cell(self, cell: NotebookNode, resources, cell_index: int):
        where, locked = (submission.grade_id(cell), self.notebook_id, self.assignment_id), False
        try:
            locked = self.gradebook.find_source_cell(*where).locked
        except MissingEntry:
            cell.metadata.pop("nbgrader", None)
        else:
            cell.metadata.nbgrader |= self._kinds(where)  # whatever the learner says
        handed_in, given = cell.source, cell.cell_type == "code" and locked and not cell.metadata.nbgrader["grade"]
        cell, resources = super().preprocess_cell(cell, resources, cell_index)
        if given:  # with the import that the learner added
            cell.source = handed_in
        if cell.cell_type != "code" and not locked:
            cell |= {"cell_type": "markdown", "source": as_it_is(cell.source)}
        return cell, resources

    def _kinds(self, where: tuple[str, str, str]) -> dict:
        """Returns what the exercise says that a cell is: graded, an answer, a task."""
        finds = {"solution": "find_solution_cell", "grade": "find_grade_cell", "task": "find_task_cell"}
        kinds: dict = dict.fromkeys(finds, False)
        for kind, find in finds.items():
            with suppress(MissingEntry):
                known = getattr(self.gradebook, find)(*where)
                kinds |= {kind: True} | ({} if kind == "solution" else {"points": known.max_score})
        return kinds

    def add_missing_grade_cells(self, nb: NotebookNode, resources):
        source = self.gradebook.find_notebook(self.notebook_id, self.assignment_id)
        there = {submission.grade_id(cell) for cell in nb.cells}
        points = {cell.name: cell.max_score for cell in source.grade_cells}
        solutions = {cell.name for cell in source.solution_cells}
        for cell in source.source_cells:
            if cell.name in points and cell.name not in there:
                nb.cells.append(self.missing_cell_transform(cell, points[cell.name], is_solution=cell.name in solutions))
        return nb, resources


class NoResultNoPoints(NbGraderPreprocessor):
    """Puts an error into every test cell that did not end with one number from 0 to its points, before grades are saved."""

    def preprocess_cell(self, cell: NotebookNode, resources, cell_index: int):
        if _is_test(cell) and not has_points(cell) and not is_not_judged(cell):
            cell.outputs.insert(0, _no_result("the cell did not run to its end, or did not end with the points of a report"))
        return cell, resources


class SavesWhatWasJudged(SaveAutoGrades):
    """Leaves the points of what was not judged open: with neither points nor an error, nbgrader would give all."""

    def _add_score(self, cell: NotebookNode, resources) -> None:
        super()._add_score(cell, resources)
        if is_not_judged(cell):
            where = cell.metadata.nbgrader["grade_id"], self.notebook_id, self.assignment_id, self.student_id
            grade = self.gradebook.find_grade(*where)
            grade.auto_score, grade.needs_manual_grade = None, True
            self.gradebook.db.commit()


class Legible(NbGraderPreprocessor):
    """Feedback: tables have room between their columns, and cells no prompts, for these have no numbers there.

    Where a check was not judged, neither it nor the sum has a number.
    """

    def preprocess(self, nb: NotebookNode, resources):
        resources["inlining"]["css"].append("td, th { padding-right: 1em } div.prompt { display: none }")
        for cell in nb.cells:
            if is_not_judged(cell):
                cell.metadata.nbgrader["score"] = resources["nbgrader"]["score"] = float("nan")
        return nb, resources


def rounded(number: float, digits: int = 0) -> float | str:
    """Rounds points for feedback: what is no number was not judged."""
    return NOT_JUDGED if number != number else round(number, digits)


class Export(CsvExportPlugin):
    """nbgrader's table, without a score for a submission that was not judged to its end."""

    def export(self, gradebook: Gradebook) -> None:
        super().export(gradebook)
        file = Path(self.to or "grades.csv")
        rows = [line.split(",") for line in file.read_text().splitlines()]
        for row in rows[1:]:
            with suppress(MissingEntry):
                if any(map(_is_open, gradebook.find_submission(row[0], row[3]).notebooks)):
                    row[-4] = row[-2] = ""  # raw_score and score
        file.write_text("".join(",".join(row) + "\n" for row in rows))


def _is_open(notebook: SubmittedNotebook) -> bool:
    """Returns whether one of its tests has no points, and is none that a teacher grades by hand."""
    by_hand = {cell.name for cell in notebook.notebook.solution_cells}
    tests = (grade for grade in notebook.grades if grade.cell.name not in by_hand and grade.cell_type == "code")
    return any(grade.auto_score is None and grade.manual_score is None for grade in tests)


def has_points(cell: NotebookNode) -> bool:
    """Returns whether the executed test cell shows exactly one result, a number from 0 to the cell's points."""
    with suppress(KeyError, TypeError, ValueError):
        [result] = [output for output in cell.outputs if output.output_type in ("execute_result", "error")]
        return 0 <= float(result["data"]["text/plain"]) <= float(cell.metadata.nbgrader.points)
    return False


@cache
def first_steps() -> list[type]:
    """nbgrader's own steps of tidying a submission, after ours."""
    Autograde.init_destination = regular_files_only(Autograde.init_destination)  # nbgrader has no hooks for these
    Autograde.init_notebooks = with_names_of_one_line(Autograde.init_notebooks)
    BaseConverter.convert_single_notebook = in_a_process_of_its_own(BaseConverter.convert_single_notebook)
    GenerateFeedback.init_assignment = lambda self, assignment_id, student_id: None  # copies no file of a learner's
    return [Tidied, *_with({OverwriteCells: [RemovedChecksLast]}, Autograde.sanitize_preprocessors.default())]


def steps() -> list[type]:
    """nbgrader's own steps of autograding, with these in their places."""
    mine = {Execute: [JudgeApart], SaveAutoGrades: [NoResultNoPoints, SavesWhatWasJudged]}
    return _with(mine, Autograde.autograde_preprocessors.default())


def _with(mine: dict[type, list[type]], theirs: list[type]) -> list[type]:
    return [step for their in theirs for step in mine.get(their, [their])]
