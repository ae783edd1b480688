"""Answers that are written down to be run: what is right, what is right in another way, and each mistake with its sentence.

They stand in solutions/<exercise>/mistakes.py, for teachers and CI. Running one makes its record and tests its hint.

A mistake is the right answer with one step changed, and the sentence that tells the learner: what the answer does, then
what to do. Write the right answer as a class with a method for each step; a mistake is one line then: `slip`. Where a
line isn't enough, write `@mistake` above a class or a function. Leave the sentence out where the report has a hint
already, and give `says`. Begin with points=0: the run prints what it got. Eight mistakes per task are enough, if
they're those that people make, and every wrong answer that once passed.
"""

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from manyranks import grade
from manyranks.grade.check import Record, Task, looks
from manyranks.grade.trial import Trial
from manyranks.measure.fingerprints import Print, fact
from manyranks.measure.mistakes import Mistake, changed
from manyranks.world.strangers.trouble import ending

RIGHT, ALSO, MISTAKE = "right", "also right", "mistake"


class Answer(NamedTuple):
    """An answer to a task. kind: "right", "also right" or "mistake"; hint: what to tell who makes it.

    says: words that its report must have besides the hint; points: that it gets; on: the sizes of the worlds that tell it.
    """

    kind: str
    task: str
    code: Any
    hint: str = ""
    says: str = ""
    points: float = 0.0
    on: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        return self.code.__name__

    def worlds(self, task: Task) -> tuple[int, ...]:
        """Picks the worlds that tell a mistake. One of three ranks is enough, for there nothing works by halves."""
        return self.on or tuple(n for n in task.worlds if n == 3) or task.worlds[-1:]


def right(task: str) -> Callable:
    """A decorator: what stands below is right, and others are compared with it. Other right answers: `also_right`."""
    return _kept(lambda code: Answer(RIGHT, task, code))


def also_right(task: str) -> Callable:
    """A decorator: what stands below is written differently, and gets all points."""
    return _kept(lambda code: Answer(ALSO, task, code))


def mistake(task: str, hint: str = "", *, says: str = "", points: float = 0.0, on: tuple[int, ...] = ()) -> Callable:
    """A decorator: what stands below is wrong. hint: what to tell who makes it; empty where the judges know what to say.

    says: other words that the report must have; points: that are left on the worlds `on`, as a rule one of 3 ranks.
    """
    return _kept(lambda code: Answer(MISTAKE, task, code, hint, says, points, on))


def slip(
    task: str, name: str, points: float, hint: str, answer=None, /, says: str = "", on: tuple[int, ...] = (), **steps
) -> None:
    """Keeps a mistake in one line, as `mistake` does, under this name in the file.

    answer: a function, or a class that gets other steps; by default the class that is called like the task
    """
    names = sys._getframe(1).f_globals
    if names.get(name, answer) is not answer:
        raise ValueError(f"two answers are called {name}, and the second would take the first one's place: rename it")
    for step, function in steps.items():
        if getattr(function, "__name__", "") == "<lambda>":
            function.__name__, function.__qualname__ = step, f"{name}.{step}"
    code = names[task] if answer is None else answer
    if isinstance(code, type):
        code = type(code)(name, (code,), {"__module__": names["__name__"], **steps})
    code.__name__ = code.__qualname__ = name
    names[name] = mistake(task, hint, says=says, points=points, on=on)(code)


def _kept(make: Callable) -> Callable:
    def keep(code):
        code.__answers__ = [*vars(code).get("__answers__", []), make(code)]  # a subclass has its own
        return code

    return keep


def answers(file: Path) -> list[Answer]:
    """Returns the answers of solutions/<exercise>/mistakes.py, in order. They travel to ranks as a notebook's functions do."""
    names: dict[str, Any] = {"__name__": "__main__", "__file__": str(file)}
    exec(compile(file.read_text(), str(file), "exec"), names)
    own = [vars(code).get("__answers__", []) for code in names.values() if hasattr(code, "__dict__")]
    return list(dict.fromkeys(answer for each in own for answer in each))


def given(task: Task, code) -> Any:
    """Returns the answer as a check takes it: a class that is called like a function is made first."""
    return code() if isinstance(code, type) and not task.a_class else code


def tasks(exercise: str) -> dict[str, Task]:
    """Name -> task, in the order of the exercise's module."""
    modules = (module for name in grade.__all__ if hasattr(module := getattr(grade, name), "__name__"))
    found = (value for module in modules for value in vars(module).values() if isinstance(value, Task))
    return {task.name: task for task in found if task.exercise == exercise}


def tried(task: Task, answer: Answer) -> tuple[Task, list[Trial]]:
    """The task on the worlds that tell the answer, and what happened there."""
    narrow = replace(task, worlds=answer.worlds(task)) if answer.kind == MISTAKE else task
    return narrow, narrow.tried(given(task, answer.code))


def record_of(task: Task, ran: list[tuple[Answer, list[Trial]]]) -> Record:
    """Makes a record of the runs of what is right and of each mistake. Raises ValueError where none is right or runs."""
    one, done = next(((answer, done) for answer, done in ran if answer.kind == RIGHT), (None, []))
    if one is None:
        raise ValueError(f"mistakes.py has no @right answer to {task.name}")
    for each in done:
        if each.trouble:
            raise ValueError(f"{one.name} in {task.name}, {each}: {each.trouble.problem} ({each.trouble.hint})")
    record = Record({each.key: each.seen for each in done})
    known = [mistake_of(task, answer, done, record) for answer, done in ran if answer.kind == MISTAKE and answer.hint]
    return replace(record, mistakes=tuple(known))


def mistake_of(task: Task, answer: Answer, done: list[Trial], record: Record) -> Mistake:
    """Works out what the mistake changes."""
    differs = {}
    for one in done:
        pairs = zip(one.seen, record.right[one.key], strict=True) if one.seen else ()
        facts = [changed(looks(task, got), looks(task, right)) for got, right in pairs]
        if any(facts):
            differs[one.key] = facts
    troubles = {one.key: ending(one.trouble) for one in done if one.trouble}
    return Mistake(answer.name, answer.hint, differs, troubles)


class Solved:
    """Records that are made here and now. file: solutions/<exercise>/mistakes.py; seed: of numbers that nobody has seen."""

    def __init__(self, file: Path, seed: int):
        self._answers, self._seed = answers(file), seed
        self._ran: dict[Answer, list[Trial]] = {}

    def right(self, task: Task) -> Record:
        """Returns the record of what is right, without the mistakes."""
        return record_of(task, self._runs(task, RIGHT))

    def whole(self, task: Task) -> Record:
        """Returns the record with the mistakes, which are run when somebody first asks for them."""
        return record_of(task, self._runs(task, RIGHT, MISTAKE))

    def _runs(self, task: Task, *kinds: str) -> list[tuple[Answer, list[Trial]]]:
        task = replace(task, seed=self._seed)
        own = [answer for answer in self._answers if answer.task == task.name and answer.kind in kinds]
        for answer in own:
            if answer not in self._ran and (answer.kind == RIGHT or answer.hint):
                self._ran[answer] = tried(task, answer)[1]
        found = [(answer, self._ran[answer]) for answer in own if answer in self._ran]
        for answer, done in found:
            if answer.kind == RIGHT and any(one.trouble for one in done):
                del self._ran[answer]  # the machine's fault: the next time, it is run again
        return found


def dumped(tasks: dict[str, Record]) -> str:
    """JSON with a line for each case of the right answer, and each mistake."""
    parts = []
    for name, record in tasks.items():
        right = [f"{json.dumps(case)}: {_json(fact([vars(seen) for seen in ranks]))}" for case, ranks in record.right.items()]
        mistakes = [_json(mistake._asdict()) for mistake in record.mistakes]
        parts.append(
            f'{json.dumps(name)}: {{"right": {{\n' + ",\n".join(right) + '},\n"mistakes": [\n' + ",\n".join(mistakes) + "]}"
        )
    return "{\n" + ",\n".join(parts) + "\n}\n"


def _json(value) -> str:
    return json.dumps(_to_json(value), ensure_ascii=False, separators=(",", ":"))


def _to_json(value):
    if isinstance(value, Print):
        return {"print": [value.form, *value.numbers]}
    if isinstance(value, Mapping):
        return {name: _to_json(one) for name, one in value.items()}
    return [_to_json(one) for one in value] if isinstance(value, list | tuple) else value
