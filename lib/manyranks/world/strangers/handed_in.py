"""The notebooks that strangers have handed in below a folder: whose they are, and why one is not read."""

import os
import unicodedata
from collections import Counter
from collections.abc import Collection, Iterator
from itertools import chain, groupby
from pathlib import Path
from typing import NamedTuple

from manyranks.world.strangers.scratch import contents, no_file

_FEW = 20  # rows of a student for files that are refused
NOTHING = "it has no notebook where a submission is: student/exercise/exercise.ipynb"
BOTH = "there are two notebooks or folders of this name, perhaps of two students: keep one, or rename it"


class Submission(NamedTuple):
    """A notebook below the folder.

    refused: why it is not read; empty where it is
    version: of what it has, its SHA-256
    costs: whether points are lost where it is refused: not where another one of the exercise is read, or has cost them
    """

    path: Path
    student: str
    exercise: str
    refused: str
    version: str
    costs: bool = True


def submissions(folder: Path, exercises: Collection[str]) -> list[Submission]:
    """All notebooks below the folder, students in their order; of a student, one an exercise, of those with these names.

    Raises ValueError where there are none.
    """
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder: give the one that has the submissions")
    found, unread, tops = [], [], []
    ways = [[], *([one] for one in exercises), *([one, one] for one in exercises)]
    for place, folders, files in os.walk(folder, onerror=lambda error: unread.append(Path(error.filename))):
        deep = len(Path(place).relative_to(folder).parts) > 2  # nothing is handed in there
        folders[:] = [] if deep else sorted(name for name in folders if name != ".ipynb_checkpoints")
        tops, inner = tops or [Path(place) / name for name in folders], set(folders)
        for path in (Path(place) / name for name in (*files, *folders)):
            student, *inside = (*path.relative_to(folder).parts[:-1], path.name.removesuffix(".ipynb"))
            student = _composed(student)
            refused, version = no_file(path), ""
            if not refused and (path.suffix != ".ipynb" or path.name in inner):
                continue
            if not refused and inside in ways:
                refused, version, _ = contents(folder, path)
            elif not refused:
                refused = "it is not where a submission is: student/exercise/exercise.ipynb"
                if meant := [name for name in exercises if path.stem != name and path.stem.startswith(name)]:
                    refused = f"it is not called {meant[0]}.ipynb: rename it, if that is what it is"
            found.append(Submission(path, student, path.stem, refused, version))
    found = list(_one_each(found, folder))
    whose = [(path, _composed((*path.relative_to(folder).parts, "")[0])) for path in unread]
    found += [Submission(path, student, "", "it cannot be listed", "") for path, student in whose]
    if not found:
        raise ValueError(f"{folder} has no notebooks: give the folder that has the submissions")
    here = {one.student for one in found}
    found += [Submission(each, student, "", NOTHING, "") for each in tops if (student := _composed(each.name)) not in here]
    each = groupby(sorted(found, key=lambda one: (one.student, one.exercise, str(one.path))), lambda one: one.student)
    return list(chain(*(_few(list(own)) for _, own in each)))


def _composed(name: str) -> str:
    """Spells a name as it is shown: some systems make two signs of a letter and its accent, and some one."""
    return unicodedata.normalize("NFC", name)


def _one_each(found: list[Submission], folder: Path) -> Iterator[Submission]:
    """Leaves each student one notebook per exercise, and none where two students may be meant; refuses the others.

    A file that is refused beside a notebook that counts costs nothing.
    """
    read, counts, lost = [one for one in found if not one.refused], set(), set()
    place = {one: (one.student, one.path.relative_to(folder).parts[0]) for one in found}
    tops = {place[one] for one in read}
    both = {student for student, number in Counter(student for student, _ in tops).items() if number > 1}
    here = {student for student, _ in tops}
    for one in read + [one for one in found if one.refused]:
        key = one.student, one.exercise
        again = BOTH if one.student in both else "there is another notebook of this exercise" if key in counts else ""
        if refused := one.refused or again:
            others = {key, (one.student, one.student)}  # the second may be of any exercise
            elsewhere = one.student in here and place[one] not in tops  # perhaps another student's, of a name like this one
            costs = key not in lost and not others & counts and not elsewhere
            one = one._replace(refused=refused, version="", costs=costs)
        (lost if refused else counts).add(key)
        yield one


def _few(own: list[Submission]) -> list[Submission]:
    """Keeps the first few of a student's refused notebooks, and says how many more there are."""
    refused = [one for one in own if one.refused]
    more = f"{len(refused) - _FEW} more files are not where a submission is, or are refused for other reasons"
    last = [one._replace(refused=more) for one in refused[_FEW : _FEW + 1]]
    return [one for one in own if not one.refused or one in refused[:_FEW]] + last
