"""nbgrader steps: checks are judged apart from what learners wrote, and a cell without a number of points is worth none.

A cell that asks a grader of this library is judged by grade.apart, whatever the learner's own kernel would have said of it.
Only where a teacher has added test cells of another form does the notebook run in a kernel, as nbgrader has it.

nbgrader itself gives full marks to a test cell without output, or with one that is no number ≥ 0 (its issue 427, and
`determine_grade` in nbgrader/utils.py), and drops a submission whose kernel dies. nbgrader_config.py puts these steps in place.
"""

import math

from nbclient.exceptions import CellTimeoutError, DeadKernelError
from nbformat import NotebookNode
from nbformat.v4 import new_output
from nbgrader import utils
from nbgrader.converters import Autograde
from nbgrader.preprocessors import Execute, NbGraderPreprocessor, SaveAutoGrades
from nbgrader.preprocessors.execute import UnresponsiveKernelError

from manyranks.grade import apart, submission

_PATIENCE = 2  # cells in a row that may be late before the kernel counts as lost


class ExecuteWhatRuns(Execute):
    """Executes as nbgrader does, but keeps what ran when the kernel dies or answers no more."""

    def preprocess(self, nb: NotebookNode, resources, km=None):
        self._late = 0
        try:
            return super().preprocess(nb, resources, km)
        except (DeadKernelError, CellTimeoutError, UnresponsiveKernelError) as error:
            self.log.warning("the rest of the notebook did not run: %s", error)
            return nb, resources

    def on_cell_executed(self, **kwargs) -> None:
        super().on_cell_executed(**kwargs)
        late = kwargs["execute_reply"]["content"].get("ename") == "CellTimeoutError"
        self._late = self._late + 1 if late else 0
        if self._late >= _PATIENCE:
            raise UnresponsiveKernelError("the kernel does not answer")


class JudgeApart(ExecuteWhatRuns):
    """Checks by grade.apart; a kernel for the other test cells, if there are any."""

    def preprocess(self, nb: NotebookNode, resources, km=None):
        graded = [
            cell for cell in nb.cells if cell.cell_type == "code" and utils.is_grade(cell) and not utils.is_solution(cell)
        ]
        if not all(submission.is_check(cell) for cell in graded):
            nb, resources = super().preprocess(nb, resources, km)
        for judged in apart.judge(nb):
            nb.cells[judged.check.index].outputs = outputs(judged)
        return nb, resources


def outputs(judged: apart.Judged) -> list[NotebookNode]:
    """What the cell shows: the report, and the points, as a share of those that the cell is worth."""
    report = judged.report
    shown = {"text/html": report._repr_html_(), "text/plain": repr(report)}
    return [
        new_output("display_data", data=shown),
        new_output("execute_result", data={"text/plain": f"{judged.points:g}"}, execution_count=1),
    ]


class NoResultNoPoints(NbGraderPreprocessor):
    """Puts an error into every test cell that did not end with one number from 0 to its points, before grades are saved."""

    def preprocess_cell(self, cell: NotebookNode, resources, cell_index: int):
        if cell.cell_type == "code" and utils.is_grade(cell) and not utils.is_solution(cell) and not has_points(cell):
            text = "no points: the cell did not run to its end, or did not end with the points of a report"
            cell.outputs.insert(0, new_output("error", ename="NoResult", evalue=text, traceback=[f"NoResult: {text}"]))
        return cell, resources


def has_points(cell: NotebookNode) -> bool:
    """Whether the executed test cell shows exactly one result, a number from 0 to the cell's points."""
    results = [output for output in cell.outputs if output.output_type == "execute_result"]
    if len(results) != 1 or any(output.output_type == "error" for output in cell.outputs):
        return False
    try:
        points = float(results[0].data["text/plain"])
    except (KeyError, TypeError, ValueError):
        return False
    return math.isfinite(points) and 0 <= points <= float(cell.metadata.nbgrader.points)


def steps() -> list[type]:
    """nbgrader's own steps of autograding, with these in their places."""
    theirs = Autograde.autograde_preprocessors.default()
    mine = {Execute: [JudgeApart], SaveAutoGrades: [NoResultNoPoints, SaveAutoGrades]}
    return [step for their in theirs for step in mine.get(their, [their])]
