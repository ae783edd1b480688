"""A learner's points over all exercises: a line after each check, and a page. For learning only: a teacher's are made anew."""

import html

from manyranks import settings

EXERCISES = ("00_start_here", "01_collectives", "02_data_parallel", "03_zero", "04_checkpointing", "05_pipeline")
EXERCISES += ("06_tensor", "07_context", "08_expert", "09_mfu", "10_nd_parallel", "11_kernels", "12_failures")
TASKS: dict[str, dict[str, float]] = {}  # exercise -> its tasks and what each is worth, as far as they've been loaded
_checked: dict[str, dict[str, tuple[float, str]]] = {}  # in this kernel: exercise -> task -> points, hint


class Told(str):
    """A sentence that a page shows in small letters."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        return f"<small>{html.escape(self)}</small>"


def after(exercise: str, task: str, points: float, hint: str) -> Told:
    """Notes a check and returns what to say after its report: the total, and which earlier task has the same hint.

    exercise, task: as the notebook has them
    points: reached
    hint: of the first wrong line
    """
    if exercise not in TASKS:  # a report that no task has made
        return Told()
    here = _checked.setdefault(exercise, {})
    worth = TASKS[exercise]
    same = next((name for name, (_, earlier) in here.items() if name != task and hint and hint == earlier), "")
    here[task] = points, hint
    kept = settings.read("progress")
    before = kept.get(exercise) if isinstance(kept.get(exercise), dict) else {}
    settings.write("progress", kept | {exercise: before | {name: [got, worth[name]] for name, (got, _) in here.items()}})
    reached, right = sum(got for got, _ in here.values()), sum(got == worth[name] for name, (got, _) in here.items())
    total = f"{reached:g} of {sum(worth.values()):g} points"
    if right == len(worth):
        said = f"All done: {total}. {_onwards(exercise)}"
    else:
        said = f"So far {total}; {right} of {len(worth)} tasks are right."
    return Told(f"{said} {same} has the same hint: fix that one first, then check this one again." if same else said)


def _onwards(exercise: str) -> str:
    later = [name for name in EXERCISES if name > exercise]
    return f"On to chapter {later[0][:2]}." if later else "That was the last exercise."


class Page:
    """The points of all exercises, as they were when a task was last checked."""

    def __init__(self, kept: dict):
        self._rows = [(name, *_points(kept.get(name))) for name in EXERCISES]

    def __repr__(self) -> str:
        return "\n".join(f"{name:18} {self._said(tasks, got, of)}" for name, tasks, got, of in self._rows)

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><td style='text-align:left'>{name}</td><td><div style='width:160px;height:9px;border:1px solid #787878'>"
            f"<div style='width:{100 * got / (of or 1):.0f}%;height:100%;background:#009E73'></div></div></td>"
            f"<td style='text-align:left'>{self._said(tasks, got, of)}</td></tr>"
            for name, tasks, got, of in self._rows
        )
        return f"<table>{rows}</table>"

    @staticmethod
    def _said(tasks: int, got: float, of: float) -> str:
        return f"{got:g} of {of:g} points in {tasks} task{'s' * (tasks != 1)} checked" if tasks else "not begun"


def _points(kept: object) -> tuple[int, float, float]:
    """Tasks, points, and points that could be reached; of a file that somebody has changed only what makes sense."""
    pairs = [pair for pair in kept.values() if isinstance(pair, list)] if isinstance(kept, dict) else []
    pairs = [pair for pair in pairs if len(pair) == 2 and all(type(number) in (int, float) for number in pair)]
    return len(pairs), sum(got for got, _ in pairs), sum(of for _, of in pairs)


def my_progress() -> Page:
    """Returns the page of your points: what each exercise's checks said last."""
    return Page(settings.read("progress"))
