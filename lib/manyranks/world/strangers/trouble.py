"""Reasons why a run of a learner's function went wrong, in the learner's terms: who sent what, who waits, on which line."""

import re
import unicodedata
from collections import defaultdict
from itertools import zip_longest
from typing import NamedTuple

from manyranks.measure.journal import Entry, Frame, Stopped, to_itself
from manyranks.measure.operators import POINT_TO_POINT
from manyranks.world import cells
from manyranks.world.errors import RankDied, RankFailed, RankHung, WorldError

Notes = dict[int, list[Entry]]  # rank -> its messages, in the order they were started in

_SHOWN_LINES, _LONG = 12, 600
_LAST_WORDS = ("terminate called after throwing an instance of 'gloo", "  what():  [enforce fail at ")
_BLANKS = {*"\u034f\u115f\u1160\u17b4\u17b5\u180b\u180c\u180d\u180f\u2800\u3164\uffa0\U0001d159"}  # letters without ink
_BLANKS |= {chr(code) for first, last in ((0xFE00, 0xFE0F), (0xE0100, 0xE01EF)) for code in range(first, last + 1)}
_NORTHERN = {*"ßæÆøØœŒþÞðłŁđĐ"}  # letters that look like no other one
FORMULA = ("=", "+", "-", "@")  # with these a spreadsheet begins to compute
_LATE = "the run was not over"
_HELPER = "exchange"  # the notebook gives it: its own line says nothing
_LIBRARY = (
    "distributed_c10d.py",
    "_ops.py",
    "functional.py",
    "module.py",
    "distributed.py",
    "graph.py",
    "c10d_logger.py",
    "_tensor.py",
    "contextlib.py",
    "__init__.py",
    "typing_extensions.py",
    "<string>",  # what a dataclass makes
)  # the innermost line where torch raises
SAME_CHUNK = "do both mean the same chunk in this step?"
RETURNED = "had returned"  # a rank's state
_ALIKE = "all ranks must make the same calls in the same order"
_FRAME = re.compile(r"^  (\S.*), in (\S+)$(?:\n    (.*))?", re.MULTILINE)  # source, where it is known
_ASKS = re.compile(r"^waited in torch\.distributed's get_\w+ \((.*)\)$")
_WAITED = re.compile(r"waited in (?P<what>(?P<op>\w+) #\d+ .*?(?:rank (?P<peer>\d+))?) \((?P<label>[^()]*)\)$")


class Trouble(NamedTuple):
    """The reason why a run went wrong.

    problem: what happened
    hint: what to look at
    hung: nobody ends it
    unwritten: the function that has no answer yet
    deadlock: it hangs as ranks wait, which is found long before the time is over
    """

    problem: str
    hint: str
    hung: bool = False
    unwritten: str = ""
    deadlock: bool = False


def trouble(error: WorldError, notes: Notes) -> Trouble:
    """Says what the error means."""
    if isinstance(error, RankHung):
        found = _hang(error, notes)
        return found._replace(hung=True, deadlock=not found.problem.startswith(_LATE))
    if isinstance(error, RankDied) and (found := clash(notes) or (error.exit_code < 0 and uneven(notes))):
        return Trouble(*found)
    if isinstance(error, RankFailed):
        return _failure(error)
    return Trouble(_first_line(error), "")


def ending(found: Trouble) -> str:
    """A problem, and who waits for what, without what differs from one learner, or world, to the next: ranks, names, lines."""
    text = f"{found.problem}; {_without_places(found.hint)}" if found.hung else found.problem
    text = re.sub(r"^(both ranks|all \d+ ranks|ranks? [\d, and]+) raised", "raised", text)
    return re.sub(r"\d[\d,.]*|'[^']*'|\"[^\"]*\"", "#", text)[:300]


def _without_places(text: str) -> str:
    """Drops what stands in parentheses, and in those that a learner's line may have inside them."""
    shorter = re.sub(r" ?[(][^()]*[)]", "", text)
    return text if shorter == text else _without_places(shorter)


def late(error: RankHung) -> bool:
    """Returns whether the time was over, and the ranks did not just wait for each other."""
    return f"{error}".startswith(_LATE)


def clash(notes: Notes) -> tuple[str, str] | None:
    """The earliest message that is larger than the room its receiver made for it, and a hint."""
    sends, receives = _by_pair(notes, "send"), _by_pair(notes, "recv")
    met = [(k, pair) for pair in sends for k in range(min(len(sends[pair]), len(receives[pair])))]
    for number, who in sorted(met):
        sent, room = sends[who][number], receives[who][number]
        if sent.bytes > room.bytes:
            return _clash(who, sent, room)
    return None


def _clash(who: tuple[int, int, int], sent: Entry, room: Entry) -> tuple[str, str]:
    source, to, _ = who
    alike = sent.dtype == room.dtype
    there, here = ("", "") if alike else (f" of {sent.dtype}", f" of {room.dtype}")
    problem = (
        f"rank {source} sent {sent.elements:,} elements{there} ({sent.bytes:,} bytes), "
        f"rank {to} made room for {room.elements:,}{here} ({room.bytes:,} bytes)"
    )
    question = SAME_CHUNK if alike else "give the room the dtype of what comes"
    return problem, f"{question} ({_places({source: sent, to: room})})"


def _places(calls: dict[int, Entry]) -> str:
    """The ranks' lines; one alone where it is the same."""
    places = {place(call.frames): rank for rank, call in calls.items()}
    return next(iter(places)) if len(places) == 1 else "; ".join(f"rank {r}: {text}" for text, r in places.items())


def uneven(notes: Notes) -> tuple[str, str] | None:
    """The earliest collective of the whole world that is not the same on two ranks, and a hint.

    gloo says nothing of it, or ends one of the processes.
    """
    calls = {rank: [entry for entry in entries if entry.op not in POINT_TO_POINT] for rank, entries in notes.items()}
    for k in range(max(map(len, calls.values()), default=0)):
        there = {rank: mine[k] for rank, mine in calls.items() if k < len(mine)}
        first = min(there)
        for rank, call in there.items():
            if _kind(call) != _kind(there[first]):
                problem = _unlike(k, first, there[first], rank, call)
                return problem, f"{_ALIKE} ({_places({first: there[first], rank: call})})"
    return None


def _kind(call: Entry) -> tuple:
    return call.op, None if call.sizes else call.bytes, call.peer


def _unlike(number: int, one: int, first: Entry, other: int, second: Entry) -> str:
    if (first.op, first.peer) == (second.op, second.peer):
        return f"rank {one} gave {first.bytes:,} bytes to its {first.op} #{number}, rank {other} gave {second.bytes:,} bytes"
    return f"rank {one} called {_described(first)} where rank {other} called {_described(second)}"


def _described(call: Entry) -> str:
    return f"{call.op} of {call.bytes:,} bytes" + ("" if call.peer is None else f" with root {call.peer}")


def _by_pair(notes: Notes, op: str) -> dict[tuple, list[Entry]]:
    """Sorts the messages that were sent, or received: (source, destination, tag) -> those, in order."""
    found: dict[tuple, list[Entry]] = defaultdict(list)
    for rank, entries in notes.items():
        for entry in entries:
            if entry.op == op and entry.peer is not None:
                source, to = (rank, entry.peer) if op == "send" else (entry.peer, rank)
                found[source, to, entry.tag].append(entry)
    return found


def place(frames: list[Frame]) -> str:
    """The learner's line, past the helper: "cell 8, line 9, in ring_all_gather: exchange(…)"."""
    return _sentence([(cells.label(frame[:2]), frame[2], cells.source_line(*frame[:2])) for frame in frames])


def _sentence(steps: list[tuple[str, str, str]]) -> str:
    """Names the learner's line.

    steps: label, function and source of each line, innermost first
    """
    theirs = [step for step in steps if not step[0].startswith(_LIBRARY)]
    own = [step for step in theirs if step[1] != _HELPER] or theirs
    if not own:
        return ""
    label, function, source = own[0]
    text = f"{label}, in {function}" + (f": {source}" if source else "")
    return text + (f"; called from {own[-1][0]}" if len(own) > 1 else "")


def _failure(error: RankFailed) -> Trouble:
    steps = [(label, function, source) for label, function, source in reversed(_FRAME.findall(error.traceback))]
    where, stopped = _sentence(steps), error.said if error.kind == Stopped.__name__ else ()
    if "_check_not_self_rank" in error.traceback:
        stopped = to_itself("send", error.rank).args
    if len(stopped) == 2:
        what, hint = stopped
        return Trouble(what, hint + (f" ({where})" if where else ""))
    if error.kind == "NotImplementedError" and not error.said and steps:  # torch's own have a text
        return Trouble(_first_line(error), where, unwritten=steps[0][1])
    return Trouble(_first_line(error), where)


def _hang(error: RankHung, notes: Notes) -> Trouble:
    problem = _first_line(error).partition("; World(")[0]
    states = {rank: _ASKS.sub(r"was running \1", state) for rank, state in error.states.items()}  # these do not wait
    if any(state.startswith("waited") for state in states.values()):
        return Trouble(problem, _why(states, notes) or _who_waits(states, notes))
    running = [state.removeprefix("was running ") for state in states.values() if state.startswith("was running ")]
    if not running:
        return Trouble(problem, "; ".join(f"rank {rank} {state}" for rank, state in states.items()))
    return Trouble(problem, f"no rank waits for a message: a loop does not end ({running[0]}), or the machine was busy")


def _why(states: dict[int, str], notes: Notes) -> str:
    """Says why a collective that ranks wait in does not end, as far as that is known."""
    waits = [found["op"] for state in states.values() if (found := _WAITED.match(state))]
    if set(waits) <= set(POINT_TO_POINT):
        return ""
    if found := uneven(notes):
        return ": ".join(found)
    return f"{_who_waits(states, notes)}; {_ALIKE}" if RETURNED in states.values() else ""


def _who_waits(states: dict[int, str], notes: Notes) -> str:
    """A sentence a rank; the line once, if it is the same for all that wait."""
    waits = {rank: found for rank, state in states.items() if (found := _WAITED.match(state))}
    places = {rank: _place_of(found, notes[rank]) for rank, found in waits.items()}
    same = len(places) > 1 == len(set(places.values()))
    sentences = []
    for rank, state in states.items():
        if found := waits.get(rank):
            sentences.append(f"rank {rank} waits in {found['what']}" + ("" if same else f" ({places[rank]})"))
        else:
            now = state.replace("had ", "has ").replace("was ", "is ").replace("waited ", "waits ")
            sentences.append(f"rank {rank} {now}" + (": does a loop not end?" if state.startswith("was running") else ""))
    return "; ".join(sentences) + (f" ({next(iter(places.values()))})" if same else "")


def _place_of(found: re.Match, entries: list[Entry]) -> str:
    """Names the learner's line that waits, as far as it is known."""
    peer = None if found["peer"] is None else int(found["peer"])
    mine = [entry for entry in entries if entry.op == found["op"] and peer in (None, entry.peer)]
    return place(mine[-1].frames) if mine else found["label"]


def _first_line(error: BaseException) -> str:
    return text(error).splitlines()[0]


def text(error: BaseException) -> str:
    try:
        return str(error) or type(error).__name__
    except Exception:  # its __str__ raises
        return type(error).__name__


def short(text: str) -> str:
    """Returns its beginning, where it is long."""
    return text if len(text) <= _LONG else f"{text[:_LONG]} …"


def head(text: str) -> str:
    """The first lines, without the terminal's control characters and C++'s last words, which the report translates."""
    lines = ["".join(c for c in line if c.isprintable() or c == "\t") for line in text[:20_000].splitlines()]
    lines = [line for line in lines if not line.startswith(_LAST_WORDS)]
    said = [line for line, following in zip_longest(lines, lines[1:]) if not (_headed(line) and _headed(following))]
    return "\n".join([*map(short, said[:_SHOWN_LINES]), *(["…"] if len(said) > _SHOWN_LINES else [])])


def _headed(line: str | None) -> bool:
    """Returns whether it is a rank's heading, or the end."""
    return line is None or line.startswith("── rank ")


def named(text: str) -> str:
    """A name that somebody chose, as a table may have it: no spreadsheet computes, and two that differ look different.

    Beside ASCII, letters of the first one's script stay, of Latin those with an accent and a few of northern Europe. The rest
    is written in figures: forms of one letter, other scripts, marks that no letter takes in, what has no ink.
    """
    text = unicodedata.normalize("NFC", text)
    first = next((c for c in text if c.isascii() and c.isalnum()), "") or next((c for c in text if c.isalpha()), "")
    shown = "".join(printable(c) if _stays(c, first) else ascii(c)[1:-1] for c in text.replace("\\", "\\\\"))
    shown = no_column(re.sub("^ | $|(?<= ) ", r"\\x20", shown))
    return f"'{shown}" if shown.startswith((*FORMULA, "'")) else shown


def _stays(c: str, first: str) -> bool:
    if c.isascii() or not c.isalpha() or unicodedata.normalize("NFKC", c) != c:
        return c.isascii()
    if first.isascii() or _script(first) == "LATIN":
        return c in _NORTHERN or unicodedata.normalize("NFD", c)[0].isascii()
    return _script(c) == _script(first)


def _script(c: str) -> str:
    """Names the script as the Unicode standard names its letters: CYRILLIC, GREEK, CJK, HANGUL, …"""
    return unicodedata.name(c, "").partition(" ")[0]


def no_column(text: str) -> str:
    """Escapes semicolons that would begin a formula where a spreadsheet parts columns at them."""
    return re.sub(r""";(?=[\s"']*[=+@-])""", r"\\x3b", text)


def printable(text: str) -> str:
    """Puts it on one line, with nothing in it that a terminal obeys: a learner may have chosen the words."""
    return "".join(c if c.isprintable() and c not in _BLANKS else ascii(c)[1:-1] for c in text)
