"""Files and names of strangers: refused soon where reading would take long, and written so that none passes for another."""

import time

import pytest

from manyranks.world.scratch import parts, refused
from manyranks.world.trouble import named, no_column


def test_a_folder_is_refused_soon_where_nbgrader_would_read_for_long(tmp_path):
    started = time.monotonic()
    assert parts(b'"' + b'\\"' * 500_000) == 0
    assert parts(rb'["a\\", "b\"[,{", {}]') == 4
    assert time.monotonic() - started < 5
    for i in range(200):
        (tmp_path / f"{i}").touch()
    assert refused(tmp_path) == ""
    (tmp_path / "more").mkdir()
    assert "more than 200 files and folders, or 100 MB" in refused(tmp_path)
    for i in range(6):
        with open(tmp_path / f"{i}", "wb") as file:
            file.truncate(20 << 20)
    assert "more than 200 files and folders, or 100 MB" in refused(tmp_path)


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("\u0430da", r"\u0430da"),  # Cyrillic
        ("jose\u0301", r"jose\u0301"),
        ("jos\u00e9", "jos\u00e9"),
        ("\uff41da", r"\uff41da"),
        ("ada\U0001d159", r"ada\U0001d159"),
        ("1\u0417", r"1\u0417"),  # Cyrillic Ze, like a 3
        ("b\u1d0fb", r"b\u1d0fb"),  # a small capital
        ("ada\u2010x", r"ada\u2010x"),
        *((name, name) for name in ("Gro\u00dfmann", "\u0141ukasz", "S\u00f8ren", "\u0110\u1eb7ng 2")),
        ("\u0410\u0441\u044f", "\u0410\u0441\u044f"),
        ("\u674e\u660e", "\u674e\u660e"),
    ],
)
def test_letters_that_look_like_others_are_written_in_figures(name, shown):
    assert named(name) == shown


def test_no_semicolon_leads_to_a_formula():
    assert no_column("raised ValueError: ;=1+1; \n-2") == r"raised ValueError: \x3b=1+1\x3b \n-2".replace(r"\n", "\n")
    assert no_column("see above; it is right") == "see above; it is right"
