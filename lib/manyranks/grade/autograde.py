"""nbgrader steps: checks are judged apart from what learners wrote, and a cell without a number of points is worth none.

A cell that asks a grader of this library is judged by grade.apart, whatever the learner's own kernel would have said of it.
Only where a teacher has added test cells of another form does the notebook run in a kernel, as nbgrader has it.

A process of its own, with limits on time and memory, reads a submission and writes it anew, with nothing but cells and their
names. What nbgrader would stumble over is not in it, or ends that process: the next student is graded all the same.
nbgrader itself gives full marks to a test cell without output, or with one that is no number ≥ 0 (its issue 427, and
`determine_grade` in nbgrader/utils.py), and drops a submission whose kernel dies. nbgrader_config.py puts these steps in place.
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
from nbgrader.api import Gradebook, MissingEntry
from nbgrader.converters import Autograde, BaseConverter, GenerateFeedback
from nbgrader.nbgraderformat import MetadataValidator
from nbgrader.preprocessors import Execute, NbGraderPreprocessor, OverwriteCells, SaveAutoGrades
from nbgrader.preprocessors.execute import UnresponsiveKernelError
from traitlets import Bool
from traitlets.log import get_logger

from manyranks.grade import apart, submission
from manyranks.world.scratch import TEXT, as_it_is, in_plain_letters, refused, within_limits
from manyranks.world.trouble import printable

_MOST, _CELLS, _CODE = 200, 1000, 200_000  # cells with a name of nbgrader's; all cells, and letters, of a notebook
_PLAIN = re.compile(r"\w[\w.@'-]*( [\w.@'-]+)*/\w[\w.@'-]*( [\w.@'-]+)*")  # student and exercise
_ID = re.compile(r"[\w.-]{1,100}")  # of a cell
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
        if not all(submission.is_check(cell) for cell in nb.cells if _is_test(cell)):
            nb, resources = super().preprocess(nb, resources, km)
        try:
            for judged in _judge(self.fewer_fences).judged(lambda: nb):
                nb.cells[judged.index].outputs = outputs(judged)
        except apart.Ended as error:
            self.log.warning("not judged to its end: %s", error)  # a check without a result has no points
        except apart.NotJudged as error:
            raise apart.NotJudged(f"NOT JUDGED, so the 0 points are nobody's: autograde it again ({error})") from error
        return nb, resources


@cache
def _judge(fewer_fences: bool) -> apart.Judge:
    """One a process: it keeps what is right for the next submission."""
    return apart.Judge(fewer_fences).__enter__()


def outputs(judged: apart.Judged) -> list[NotebookNode]:
    """What the cell shows: the report, whose text is the points, as nbgrader reads them."""
    html = f"<div class='tex2jax_ignore'>{judged.report._repr_html_()}</div>"  # a learner's words may look like formulas
    return [new_output("execute_result", data={"text/html": html, "text/plain": f"{judged.points:g}"}, execution_count=1)]


class Tidied(NbGraderPreprocessor):
    """Writes a submission anew: of each cell its kind, its source and its name. Of cells with one name, the last one keeps it.

    nbgrader leaves an empty entry in a cell that is there twice, takes it for an old version's, and grades nobody after it.
    """

    def preprocess(self, nb: NotebookNode, resources):
        seen, cells, left = set(), [], _CODE
        if len(nb.cells) > _CELLS or sum(len(cell.source) for cell in nb.cells if cell.cell_type == "code") > _CODE:
            raise ValueError(f"it has more than {_CELLS:,} cells, or more than {_CODE:,} letters of code")
        for cell in reversed(nb.cells):
            told, name = cell.metadata.get("nbgrader"), submission.grade_id(cell)
            text = f"{cell.source}"[: None if cell.cell_type == "code" else min(TEXT, left)]  # pictures may be in a text
            left -= len(text) * (cell.cell_type != "code")
            cells.insert(0, _NEW[cell.cell_type](text))
            if _ID.fullmatch(name) and name not in seen and len(seen) < _MOST:
                seen.add(name)
                kinds = {kind: bool(told.get(kind)) for kind in ("grade", "solution", "locked", "task")}
                kinds |= {"grade_id": name, "schema_version": MetadataValidator.schema_version}
                cells[0].metadata.nbgrader = NotebookNode(kinds)
        return new_notebook(cells=cells), resources


def in_a_process_of_its_own(convert):
    """What nbgrader does with a notebook before it's judged, and with the page for feedback. Raises as within_limits does."""

    @wraps(convert)
    def limited(self, filename: str) -> None:
        if not getattr(self, "_sanitizing", True):
            return convert(self, filename)
        within_limits(lambda: convert(self, filename))
        told = self.init_single_notebook_resources(filename)["nbgrader"]
        self.writer.build_directory = self._format_dest(told["assignment"], told["student"])  # where it has been written

    return limited


def regular_files_only(start):
    """Before nbgrader opens any of a submission: raises ValueError where it has links, devices, pipes or far too much.

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
    """Whether nbgrader was ended before the checks of these notebooks had a result: then they are judged anew."""
    cells = (cell for path in folder.glob("*.ipynb") for cell in nbformat.read(path, 4).cells if _is_test(cell))
    return any(not cell.outputs for cell in cells)


def _is_test(cell: NotebookNode) -> bool:
    return cell.cell_type == "code" and utils.is_grade(cell) and not utils.is_solution(cell)


def with_names_of_one_line(start):
    """Leaves out names that nbgrader takes for patterns, or for columns of its table; gives no points where no notebook is."""

    @wraps(start)
    def listed(self) -> None:
        for log in (self.log, get_logger()):
            log.addFilter(in_plain_letters)
        try:
            start(self)
        finally:
            for folder in glob(self._format_source(self.coursedir.assignment_id, self.coursedir.student_id)):
                if not _PLAIN.fullmatch(last := "/".join(Path(folder).parts[-2:])) or printable(last) != last:
                    self.log.error("%s is left out: a name has letters, digits, . _ @ - ' and single blanks", printable(folder))
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
    """Puts back removed checks at the end, for nbgrader stops where a text comes before. Learners' texts show as they are."""

    def preprocess_cell(self, cell: NotebookNode, resources, cell_index: int):
        where, locked = (submission.grade_id(cell), self.notebook_id, self.assignment_id), False
        try:
            locked = self.gradebook.find_source_cell(*where).locked
        except MissingEntry:
            cell.metadata.pop("nbgrader", None)
        with suppress(MissingEntry):
            known = self.gradebook.find_grade_cell(*where)
            cell.metadata.nbgrader |= {"grade": True, "points": known.max_score}  # whatever the learner says
        cell, resources = super().preprocess_cell(cell, resources, cell_index)
        if cell.cell_type != "code" and not locked:
            cell |= {"cell_type": "markdown", "source": as_it_is(cell.source)}
        return cell, resources

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
        if _is_test(cell) and not has_points(cell):
            text = "no points: the cell did not run to its end, or did not end with the points of a report"
            cell.outputs.insert(0, new_output("error", ename="NoResult", evalue=text, traceback=[f"NoResult: {text}"]))
        return cell, resources


def has_points(cell: NotebookNode) -> bool:
    """Whether the executed test cell shows exactly one result, a number from 0 to the cell's points."""
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
    mine = {Execute: [JudgeApart], SaveAutoGrades: [NoResultNoPoints, SaveAutoGrades]}
    return _with(mine, Autograde.autograde_preprocessors.default())


def _with(mine: dict[type, list[type]], theirs: list[type]) -> list[type]:
    return [step for their in theirs for step in mine.get(their, [their])]
