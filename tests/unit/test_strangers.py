"""Files and names of strangers: refused soon where reading would take long, and written so that none passes for another."""

import html
import itertools
import json
import logging
import os
import re
import time
import unicodedata
from contextlib import nullcontext

import pytest

from manyranks.world.strangers import scratch
from manyranks.world.strangers.scratch import colored, in_plain_letters, refused
from manyranks.world.strangers.trouble import named, no_column
from tests.fences import SLOW_TO_COLOR


def test_a_folder_is_refused_soon_where_nbgrader_would_read_for_long(tmp_path):
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
    ("read", "why"),
    [
        (lambda: None, ""),
        (lambda: bytes(3 << 30), "MemoryError: "),
        (lambda: time.sleep(60), "it took more than 4 s"),
        (lambda: os._exit(0), "it ended the process that read it"),
        (lambda: all(itertools.repeat(True)), "or took 1 s of a processor"),
        (lambda: json.loads("x" * 9), "JSONDecodeError: Expecting value"),
        (lambda: open("é" * 5_000), "^OSError: .*é$"),  # cut in the middle of a letter
    ],
)
def test_what_reads_a_stranger_s_file_has_limits(read, why, monkeypatch):
    monkeypatch.setattr(scratch, "SECONDS", 1)
    monkeypatch.setattr(scratch, "WAITS", 4)
    with pytest.raises(ValueError, match=why) if why else nullcontext():
        scratch.within_limits(read)


def test_a_folder_is_refused_that_a_link_leads_to(tmp_path):
    (tmp_path / "ada" / "01").mkdir(parents=True)
    (tmp_path / "bob").symlink_to("ada")
    (tmp_path / "ada" / "02").symlink_to("01")
    found = {name: refused(tmp_path / name) for name in ("ada/01", "ada/02", "bob/01")}
    assert [name for name, why in found.items() if "is a link, or in one" in why] == ["ada/02", "bob/01"]


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("\u0430da", r"\u0430da"),  # Cyrillic
        ("josx\u0301", r"josx\u0301"),
        ("jose\u0301", "jos\u00e9"),
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


@pytest.mark.parametrize("logged", [("copying %s", "x\n[App | INFO] y\r"), ("Traceback:\n  line\n[App | INFO] y\r",)])
def test_no_word_of_a_stranger_begins_a_line_of_a_log(logged):
    record = logging.LogRecord("", logging.INFO, "", 1, logged[0], logged[1:], None)
    assert in_plain_letters(record)
    _, *more = record.getMessage().split("\n")
    assert more[-1] == r"  | [App | INFO] y\r"
    assert all(line.startswith("  | ") for line in more)


def test_a_log_has_the_ends_of_a_long_message():
    record = logging.LogRecord("", logging.INFO, "", 1, "first %s last", ("x" * 1_000_000,), None)
    in_plain_letters(record)
    assert len(record.getMessage()) < 11_000
    assert re.fullmatch("first x+\n.*…\n.*x last", record.getMessage())


def test_code_is_colored_in_a_time_that_grows_as_its_length_does():
    started = time.monotonic()
    for code in (*SLOW_TO_COLOR, "'", "\\'", "'\\", '"""', '"""\\', "\"'", "#", " ", "in "):
        for end in ("", "\\", "\n'"):
            colored((200_000 // len(code) * code) + end)
    assert time.monotonic() - started < 60


def test_code_is_shown_as_it_is():
    code = 'if x < 1:  # "why"\n    s = """<b>\n"""; t = \'\\\'#\'; u = "open\nreturn 2'
    shown = colored(code, metadata={})
    assert html.unescape(re.sub("<[^>]*>", "", shown)) == code
    assert re.findall('<span class="(..?)">([^<]*)', shown) == [
        ("k", "if"),
        ("c1", '# "why"'),
        ("s2", '"""&lt;b&gt;\n"""'),
        ("s2", "'\\'#'"),
        ("s2", '"open'),
        ("k", "return"),
    ]


def test_no_semicolon_leads_to_a_formula():
    assert no_column("raised ValueError: ;=1+1; \n-2") == r"raised ValueError: \x3b=1+1\x3b \n-2".replace(r"\n", "\n")
    assert no_column("see above; it is right") == "see above; it is right"


ALIKE = [  # two names that look alike where letters are shown as they are
    ("Соня", "С\u03bfня"),
    ("Ваня", "Ва\U00016fe4ня"),
    ("Ваня", "Ва\u034fня"),
    ("आ", "अ\u093e"),
    ("力也", "カ也"),
    ("É", "É\u0430"),
]


@pytest.mark.parametrize(("one", "other"), ALIKE)
def test_a_name_shows_no_other_script_and_no_mark_beside_its_first_letter_s(one, other):
    assert named(one) == one
    assert "\\" in named(other)


@pytest.mark.parametrize("name", ["Андре\u0439", "\uae40\ud55c\uae00", "Jos\u00e9", "Þór", "Łukasz", "Ünal", "עדה"])
def test_a_name_is_shown_composed_and_in_its_own_letters(name):
    assert named(unicodedata.normalize("NFD", name)) == named(name) == name
