"""Draws docs/play.json, which record.py has recorded, as pictures that static/play.js steps through.

A picture is an SVG. Each part says from which step (data-from) it shows, and in which it no longer does (data-to). Without
JavaScript one step stays.
"""

import html
import json
from collections.abc import Iterable, Sequence
from itertools import groupby, pairwise
from pathlib import Path

FILE = Path(__file__).with_name("play.json")
COLORS = ("#9ecae1", "#fdae6b", "#a1d99b", "#e7a6c8")  # of ranks, as in show/style.py
_TIP = '<marker id="tip" viewBox="0 0 4 4" refX="2" refY="2" orient="auto"><path d="M0 0L4 2L0 4z"/></marker>'
_WIDE = 360  # of a picture; a phone shows it 1 : 1
_SLOTS = {"F": 1, "B": 2}  # a backward takes twice as long as a forward


class Picture:
    """Parts of an SVG, and a sentence for each step. still: the step that is there without JavaScript."""

    def __init__(self, name: str, says: Sequence[str], high: float, still: int):
        self.name, self.says, self._high, self._still = name, list(says), high, still
        self._parts: list[str] = []

    def add(self, part: str, steps: Iterable[bool] | None = None) -> None:
        """A part that is always there, or in these steps."""
        if steps is None:
            self._parts.append(part)
            return
        for there, run in groupby(enumerate(steps), key=lambda step: bool(step[1])):
            first, *_, last = [k for k, _ in run] * 2
            if there:
                off = "" if first <= self._still <= last else ' class="off"'
                self._parts.append(f'<g data-from="{first}" data-to="{last + 1}"{off}>{part}</g>')

    def html(self) -> str:
        """A figure, for a page."""
        says, now = html.escape(json.dumps(self.says, ensure_ascii=False)), html.escape(self.says[self._still])
        svg = f'<svg viewBox="0 0 {_WIDE} {self._high:g}" role="img" aria-label="{html.escape(self.name)}">'
        parts = "\n".join(self._parts)
        svg = f"{svg}\n{_TIP}\n{parts}\n</svg>"
        return f'<figure class="play" data-says="{says}">\n{svg}\n<figcaption>{now}</figcaption>\n</figure>\n'


def ring(recorded: dict) -> Picture:
    """Left, who sends which number to whom in the next round; right, what each rank holds."""
    rounds, held = recorded["rounds"], recorded["held"]
    n, last = len(held), len(rounds)
    says = ["Rank r begins with 1, 2, 3, 4 times 10ʳ. The arrows show what each rank sends next."]
    for k in range(1, last):
        what = "adds it to its own" if k < n else "keeps it in place of its own"
        says.append(f"After round {k}: each rank has received one number from the rank before it, and {what}.")
    says.append(f"After {last} rounds every rank holds all four sums, and has sent {last} numbers of 4 bytes.")
    picture = Picture("Four ranks add up four numbers each, around a ring", says, 132, n - 1)
    spots = [(62 + 44 * x, 66 + 44 * y) for x, y in ((0, -1), (1, 0), (0, 1), (-1, 0))]
    for k, messages in enumerate(rounds):
        for source, to, _ in messages:
            (changed,) = [c for c in range(n) if held[to][k][c] != held[to][k + 1][c]]
            (x, y), (u, v) = spots[source], spots[to]
            line = f"M{0.7 * x + 0.3 * u:g} {0.7 * y + 0.3 * v:g}L{0.3 * x + 0.7 * u:g} {0.3 * y + 0.7 * v:g}"
            number = _text(0.875 * (x + u) - 46.5, 0.875 * (y + v) - 49.5, f"{held[source][k][changed]:g}", "small")
            picture.add(f'<path d="{line}" class="arrow"/>{number}', [j == k for j in range(last + 1)])
            picture.add(_box(160 + 49 * changed, 8 + 30 * to, 49, 26, "none", "new"), [j == k + 1 for j in range(last + 1)])
    for rank, (x, y) in enumerate(spots):
        picture.add(f'<circle cx="{x}" cy="{y}" r="12" fill="{COLORS[rank]}" class="line"/>' + _text(x, y, rank, "dark"))
        picture.add(_text(140, 21 + 30 * rank, f"rank {rank}", "small"))
        for c in range(n):
            for value in dict.fromkeys(state[c] for state in held[rank]):
                steps = [state[c] == value for state in held[rank]]
                whose = [other for other in range(n) if int(value) // 10**other % 10]
                wide = 49 / len(whose)
                stripes = [_box(160 + 49 * c + wide * k, 8 + 30 * rank, wide, 26, COLORS[of], "") for k, of in enumerate(whose)]
                number = _text(184 + 49 * c, 21 + 30 * rank, f"{value:g}", "dark")
                picture.add("".join(stripes) + _box(160 + 49 * c, 8 + 30 * rank, 49, 26, "none", "line") + number, steps)
    return picture


def pipeline(recorded: Sequence[Sequence[tuple[str, int]]]) -> Picture:
    """Draws a lane for each rank. Its actions stand where they would be if each F took one slot and each B two."""
    n, spans = len(recorded), slots(recorded)
    last = max(end for _, _, _, end in spans)
    says = ["A batch of six micro-batches is about to enter. Each rank has a quarter of the layers."]
    for now in range(1, last + 1):
        does, kept = ["waits"] * n, [0] * n
        for rank, (kind, mb), start, end in spans:
            if start < now <= end:
                does[rank] = f"{'forward' if kind == 'F' else 'backward'} {mb}"
            kept[rank] += (kind == "F" and start < now) - (kind == "B" and end <= now)
        says.append("; ".join(f"rank {rank}: {what}, keeps {kept[rank]}" for rank, what in enumerate(does)) + ".")
    bubble = n * last - sum(end - start for *_, start, end in spans)
    says[-1] = f"The step is over. The ranks waited in {bubble} of {n * last} slots: that's the bubble."
    picture = Picture("A pipeline of four ranks trains on six micro-batches", says, 124, last)
    for rank in range(n):
        picture.add(_text(17, 18 + 28 * rank, f"rank {rank}", "small") + f'<path d="M36 {32 + 28 * rank}H360" class="faint"/>')
    for rank, (kind, mb), start, end in spans:
        box = _box(36 + 12 * start, 6 + 28 * rank, 12 * (end - start), 24, COLORS["FB".index(kind)], "line")
        picture.add(box + _text(36 + 6 * (start + end), 18 + 28 * rank, mb, "dark"), [k > start for k in range(last + 1)])
    for now in range(last + 1):
        picture.add(f'<path d="M{36 + 12 * now} 2V118" class="now"/>', [k == now for k in range(last + 1)])
    return picture


def slots(recorded: Sequence[Sequence[tuple[str, int]]]) -> list[tuple[int, tuple[str, int], int, int]]:
    """When each action runs, in slots: after the rank's action before it, and after the neighbor's that it needs."""
    ends: dict[tuple[int, str, int], int] = {}
    found, clock, waiting = [], [0] * len(recorded), [list(map(tuple, own)) for own in recorded]
    while any(waiting):
        for rank, own in enumerate(waiting):
            kind, mb = own[0] if own else ("", -1)
            neighbor = rank - 1 if kind == "F" else rank + 1
            needed = ends.get((neighbor, kind, mb)) if 0 <= neighbor < len(recorded) else 0
            if own and needed is not None:
                start = max(clock[rank], needed)
                clock[rank] = ends[rank, kind, mb] = start + _SLOTS[kind]
                found.append((rank, own.pop(0), start, clock[rank]))
    return found


def fsdp(recorded: Sequence[dict], ranks: int = 4) -> Picture:
    """A row for each layer: which quarters of its parameters, and below of its gradients, each rank has."""
    says = ["Each rank owns a quarter of every layer, and nothing else."]
    says += [_changed(before["units"], after) for before, after in pairwise(recorded)]
    picture = Picture("A step of FSDP: four ranks, three layers", says, 158, 13)
    layers = len(recorded[0]["units"])
    for rank in range(ranks):
        picture.add(_text(92 + 78 * rank, 8, f"rank {rank}", "small"))
    for layer in range(layers):
        top, states = 20 + 47 * layer, [step["units"][layer] for step in recorded]
        picture.add(_text(26, top + 11, f"layer {layer + 1}", "small"))
        for kind, word in (("F", "forward"), ("B", "backward")):
            picture.add(_text(27, top + 26, word, "small"), [step["does"] == f"{kind}{layer}" for step in recorded])
        for rank in range(ranks):
            for part in range(ranks):
                x, own = 58 + 78 * rank + 17 * part, part == rank
                picture.add(
                    _box(x, top, 17, 20, "none", "dashed"), [whole and coming and not own for whole, coming, *_ in states]
                )
                picture.add(
                    _box(x, top, 17, 20, COLORS[part], "line"), [own or (whole and not coming) for whole, coming, *_ in states]
                )
                picture.add(_box(x, top + 24, 17, 9, "none", "dashed"), [leaving for *_, leaving, _ in states])
                picture.add(
                    _box(x, top + 24, 17, 9, COLORS[part], "line"), [grads or (mean and own) for _, _, grads, _, mean in states]
                )
    return picture


def _changed(before: list[list[int]], step: dict) -> str:
    """Says in words what has happened since the step before."""
    if step["does"] == "step":
        return "The optimizer has updated the shards, each on the rank that owns it. The step is over."
    if step["does"]:
        way = "Forward" if step["does"][0] == "F" else "Backward"
        return f"{way} through layer {int(step['does'][1:]) + 1}, with all its parameters."
    ((layer, old, new),) = [(k, a, b) for k, (a, b) in enumerate(zip(before, step["units"], strict=True), 1) if a != b]
    if new[1] > old[1]:
        return f"Every rank asks for the other quarters of layer {layer}; they are on their way."
    if new[1] < old[1]:
        return f"Layer {layer} is whole on every rank."
    if new[2] > old[2]:
        return f"Each rank has its own gradients of layer {layer}, so the layer's parameters are freed."
    if new[3] > old[3]:
        return f"The gradients of layer {layer} are on their way to the ranks that own the shards."
    if new[4] > old[4]:
        return f"Each rank has the mean of its quarter of layer {layer}'s gradients."
    return f"Layer {layer} is freed: only the shards stay."


def write(folder: Path) -> None:
    """Each picture as a piece of HTML, for the page that includes it."""
    recorded = json.loads(FILE.read_text(encoding="utf-8"))
    for draw in (ring, pipeline, fsdp):
        (folder / f"{draw.__name__}.html").write_text(draw(recorded[draw.__name__]).html(), encoding="utf-8")


def _box(x: float, y: float, wide: float, high: float, fill: str, looks: str) -> str:
    return f'<rect x="{x:g}" y="{y:g}" width="{wide:g}" height="{high:g}" fill="{fill}" class="{looks}"/>'


def _text(x: float, y: float, text: object, looks: str) -> str:
    return f'<text x="{x:g}" y="{y:g}" class="{looks}">{text}</text>'
