"""Functions that exercises hand out, used as a learner would."""

import re

from manyranks import given


def test_the_reports_of_exercise_00_name_the_lines_of_its_programs(capsys):
    """The text says so, and two of three answers can be read off them."""
    given.start_here.hangs("B")
    said = capsys.readouterr().out
    assert re.findall(r"\((\S+), line \d+\)", said) == ["start_here.py"] * 4
    assert "which has returned" in said
