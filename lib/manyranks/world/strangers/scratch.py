"""Files and words of strangers: reading and showing what is theirs, and a folder that their ranks may write into."""

import contextlib
import hashlib
import html
import keyword
import logging
import multiprocessing
import os
import re
import resource
import stat
import subprocess
import time
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

from manyranks.world.fences import confine
from manyranks.world.strangers.trouble import printable

MOST, MOST_FILES = 64 * 2**20, 1500  # bytes, files and folders that ranks may leave there
LARGEST, LINK = 20 * 2**20, "it is a link"  # bytes of a file that is read; why one is not
_HANDED_IN, _TOGETHER = 200, 100 * 2**20  # files and folders of a submission, and their bytes
SECONDS, WAITS = 30, 300  # of a processor, to read one in a new process; by the clock, for the machine may be busy
_MEMORY, _FILE = 2**30, 2**40  # bytes; of a file: the gradebook is large
_FORK, _LETTERS = multiprocessing.get_context("fork"), 2_000  # of what is wrong with it
TEXT, _BLANK = 20_000, 50  # letters of a text that is shown; blanks in a row
_LOGGED = 10_000  # letters of a message in a log
_COMMENT, _KEYWORD = r"(?P<c1>#.*)", rf"(?P<k>\b(?:{'|'.join(keyword.kwlist)})\b)"  # named as Pygments names them
_STRING = r"""(?P<s2>("{3}|'{3})(?>\\?[\s\S])*?(?:\4|\Z)|(["'])(?>\\[\s\S]|.)*?(?:\5|$))"""  # one without an end is one, too
_COLORED = re.compile(f"{_COMMENT}|{_KEYWORD}|{_STRING}", re.MULTILINE)  # takes a time that grows as the text does
_TURNS = re.compile("[\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")
_TIME, _LINE = re.compile(rb"[\w :.+-]{0,60}\s*"), 100  # of a submission; bytes
_TRIES, _MOMENT = 5, 0.2  # how often it is removed; seconds


def remove(folder: str) -> None:
    """Removes it, even with a folder in it that nobody can list."""
    for _ in range(_TRIES):
        for command in (["chmod", "-R", "u+rwX"], ["rm", "-rf"]):
            with contextlib.suppress(OSError):
                subprocess.run([*command, "--", folder], check=False, stderr=subprocess.DEVNULL)
        if not os.path.lexists(folder):
            return
        time.sleep(_MOMENT)
    warnings.warn(f"{folder} could not be removed", stacklevel=2)


def _raised(error: OSError) -> None:
    raise error


def too_much(folder: str) -> bool:
    """Returns whether more is in it than strangers may leave."""
    taken = count = 0
    try:
        for _, folders, files, place in os.fwalk(folder, onerror=_raised):
            count += len(folders) + len(files)
            sizes = (os.stat(file, dir_fd=place, follow_symlinks=False) for file in files[:MOST_FILES])
            taken += sum(max(one.st_size, 512 * one.st_blocks) for one in sizes)
            if count > MOST_FILES or taken > MOST:
                return True
    except FileNotFoundError:  # a check has ended in between
        return False
    except (OSError, RecursionError):  # so deep that it has no name
        return True
    return False


def contents(folder: Path, path: Path) -> tuple[str, str, bytes]:
    """Reads a file below the folder. Returns why it is not read; else its version, and what it has.

    No part of its path may be a link.
    """
    place = os.open(folder, os.O_RDONLY)
    for part in path.relative_to(folder).parts:
        above = place
        try:
            place = os.open(part, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=above)
        except OSError as error:
            return no_file(path) or os.strerror(error.errno or 0), "", b""
        finally:
            os.close(above)
    with open(place, "rb") as file:
        status = os.fstat(place)
        if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
            return LINK if stat.S_ISREG(status.st_mode) else "it is no file", "", b""
        if status.st_size > LARGEST:
            return f"it has {status.st_size >> 20} MB; at most {LARGEST >> 20} are read", "", b""
        text = file.read(LARGEST + 1)
        return "", hashlib.sha256(text).hexdigest(), text


def no_file(path: Path) -> str:
    """Says why nobody looks into it; empty for a file, and what else is there."""
    try:
        return LINK if stat.S_ISLNK(path.lstat().st_mode) else ""
    except OSError as error:
        return os.strerror(error.errno or 0)


def refused(folder: Path) -> str:
    """Returns why nobody opens what is handed in there: links, devices, pipes, or far too much; empty where all is well."""
    if folder.is_symlink() or folder.parent.is_symlink():  # a student's own folder is the parent
        return f"{printable(str(folder))} is a link, or in one"
    count = together = 0
    for place, folders, files in os.walk(folder):
        for path in (Path(place) / name for name in (*folders, *files)):
            status, shown = path.lstat(), printable(str(path))
            plain = stat.S_ISREG(status.st_mode) and status.st_nlink == 1
            if not (plain or stat.S_ISDIR(status.st_mode)) or status.st_size > LARGEST:
                return f"{shown} is a link, no file, or larger than {LARGEST >> 20} MB"
            count, together = count + 1, together + status.st_size
            if count > _HANDED_IN or together > _TOGETHER:
                return (
                    f"there are more than {_HANDED_IN} files and folders, or {_TOGETHER >> 20} MB, in {printable(str(folder))}"
                )
            if path.name == "timestamp.txt" and (status.st_size > _LINE or not _TIME.fullmatch(path.read_bytes())):
                return f"{shown} has no time"
    return ""


def within_limits(read: Callable[[], None]) -> None:
    """Calls it in a new process, with limits on time and memory. Raises ValueError where that fails, or ends there."""
    ours, theirs = _FORK.Pipe(duplex=False)
    child = _FORK.Process(target=_told, args=(theirs, read))
    child.start()
    theirs.close()
    try:
        why = ours.recv_bytes(_LETTERS).decode(errors="ignore") if ours.poll(WAITS) else f"it took more than {WAITS} s"
    except EOFError:
        why = f"it ended the process that read it, or took {SECONDS} s of a processor"
    finally:
        child.kill()
        child.join()
    if why:
        raise ValueError(why)


def _told(above: Connection, read: Callable[[], None]) -> None:
    confine.limit(_FILE, _MEMORY)
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
    warnings.simplefilter("ignore")  # of each cell that is not as it should be
    why = ""
    try:
        read()
    except Exception as error:  # of a notebook of strangers: this raises many kinds
        why = f"{type(error).__name__}: {error}"
    above.send_bytes(why.encode(errors="replace")[:_LETTERS])


def upright(text: str) -> str:
    """Returns the text with those signs in letters that turn the direction of others: else code reads unlike it runs."""
    return _TURNS.sub(lambda found: ascii(found[0])[1:-1], text)


def as_it_is(text: str) -> str:
    """Returns Markdown that shows a text with none of its HTML, and without long gaps, for others open it."""
    text = re.sub(rf"\s{{{_BLANK},}}", "\n", upright(text[:TEXT]))
    fence = "~" * (3 + max(map(len, re.findall("~+", text)), default=0))
    return f"{fence}text\n{text}\n{fence}"


def colored(code: str, **_) -> str:
    """Returns the HTML of Python, for nbconvert: with Pygments, a cell could ask for a lexer that takes years."""
    shown = _COLORED.sub(
        lambda found: f'<span class="{found.lastgroup}">{found[0]}</span>', html.escape(upright(code), quote=False)
    )
    return f'<div class="highlight hl-ipython3"><pre>{shown}</pre></div>'


def in_plain_letters(record: logging.LogRecord) -> bool:
    """Keeps a stranger's words from passing for lines of a log, and from moving about in the terminal that shows it.

    As a filter, lets all records pass.
    """
    with contextlib.suppress(TypeError, ValueError):
        text, error, record.exc_info = record.getMessage(), record.exc_info, None
        if error:
            text += "\n" + logging.Formatter().formatException(error)
        if len(text) > _LOGGED:
            text = f"{text[: _LOGGED // 2]}\n…\n{text[-_LOGGED // 2 :]}"
        record.msg, record.args = "\n  | ".join(map(printable, text.expandtabs(4).split("\n"))), ()
    return True
