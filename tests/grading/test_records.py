"""The stored records of exercises change only where something else than rounding has changed."""

import json
import re

import pytest

from manyranks.grade.answers import dumped
from manyranks.grade.check import FOLDER, loaded
from tests.grading.records import kept

TEXT = (FOLDER / "00_start_here.json").read_text()
PRINT = re.compile(r'"print":\["\[\d+\] of float64",(-?\d\.\d+)')


def made(change: float) -> str:
    """The records as a processor would make them that has another result here, by this share of it."""
    return PRINT.sub(lambda found: found[0].replace(found[1], repr(float(found[1]) * (1 + change))), TEXT)


def test_a_record_that_differs_in_last_digits_stays_as_it_is():
    assert (new := made(1e-13)) != TEXT
    assert dumped(kept(loaded(new), loaded(TEXT))) == TEXT


@pytest.mark.parametrize(
    "new",
    [made(1e-6), TEXT.replace('"hint":"', '"hint":"also, ', 1), TEXT.replace('["call","send",', '["call","send",1', 1)],
    ids=["a value", "a hint", "bytes"],
)
def test_a_record_that_says_something_else_replaces_the_old_one(new):
    assert json.loads(new) != json.loads(TEXT)
    assert json.loads(dumped(kept(loaded(new), loaded(TEXT)))) == json.loads(new)


def test_a_new_task_is_added_and_one_that_is_gone_goes():
    old = loaded(TEXT)
    first, *others = old
    assert others
    assert kept({first: old[first], "new": old[first]}, old).keys() == {first, "new"}
