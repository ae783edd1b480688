"""The graders stay small: what `python -m tests.grading.counts` prints has limits."""

import pytest

from tests.grading import counts

LIMITS = {
    "lines in grade/": 6_500,
    "lines of the longest exercise": 350,
    "lines in tests/grading/ and solutions/*/mistakes.py": 10_000,
    "files to follow a check": 5,
    "circles": 0,
    "imports for types only": 0,
}
HALF_WAY = pytest.mark.xfail(strict=True, reason="some exercises have the first form: grade/old/, grade/mfu/ and the zoo")


HELD = {"lines of the longest exercise"}


@pytest.mark.parametrize("what", [pytest.param(what, marks=() if what in HELD else HALF_WAY) for what in LIMITS])
def test_graders_stay_within_their_limits(what):
    assert counts.figures()[what] <= LIMITS[what]


def test_the_second_form_has_no_circles_and_nothing_for_types_only():
    new = {name: file for name, file in counts.modules().items() if name.partition(".")[0] != "old"}
    assert [name for name in counts.circles() if name in new] == []
    assert [name for name, file in new.items() if "TYPE_CHECKING" in file.read_text()] == []
    assert not any(other.startswith("old") for name in counts.exercises() if name in new for other in counts.closure(name))
