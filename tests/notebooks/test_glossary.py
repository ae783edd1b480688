"""The glossary: in order, each word once, links that lead to the chapter that has the word."""

import re

import nbformat
import pytest

from tests.notebooks.pages import GLOSSARY, LESSONS, NOTEBOOKS, label

WORD = re.compile(r"^\| \*\*(.+?)\*\* \| (.+) \| \[(\d\d)\]\((.+?)\) \|$", re.M)


def prose(path) -> str:
    return "\n".join(cell.source for cell in nbformat.read(path, 4).cells if cell.cell_type == "markdown")


WORDS = WORD.findall(prose(GLOSSARY))


def test_words_stand_in_alphabetical_order_each_once():
    words = [word.lower() for word, *_ in WORDS]
    assert len(words) > 80
    assert words == sorted(set(words))


@pytest.mark.parametrize("word", WORDS, ids=[word for word, *_ in WORDS])
def test_a_word_is_used_in_the_chapter_that_it_names(word):
    name, meaning, number, link = word
    chapter = NOTEBOOKS / link
    assert chapter.is_file()
    assert chapter.name.startswith(number)
    if referred := re.fullmatch(r"see (.+)", meaning):
        assert referred[1] in [other for other, *_ in WORDS]
    else:
        assert re.search(rf"\b{name.replace('-', '.?')}", chapter.read_text(encoding="utf-8"), re.I)


@pytest.mark.parametrize("chapter", LESSONS, ids=label)
def test_every_chapter_its_lab_and_its_minutes_are_on_the_map(chapter):
    (row,) = [line for line in prose(GLOSSARY).splitlines() if line.startswith(f"| [{chapter.name[:2]}]({chapter.name}) | ")]
    (minutes,) = re.findall(r"\*\*Time:\*\* about (\d+) minutes", prose(chapter))
    assert f"](lab/{chapter.name})) | {minutes} | " in row
