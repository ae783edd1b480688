"""Draws the explorers' states beforehand, for pages without Python: `make packs`. docs/static/explorer.js plays them.

python docs/packs.py [MOST] writes two files for each explorer to build/packs, which `make site` takes from there: NAME.pack,
the states, and NAME.json, the controls as HTML. MOST: of states in a pack, 1,000 without it. Packs whose sources are as they
were stay, if they have as many states.

A pack has the states where at most two controls differ from the explorer's first values, and one from a preset's. Where this
leaves a control fewer than six values, it's one control everywhere. Values are thinned evenly until there are MOST states, or
until the pack has 600 kB. Values of presets stay.

A pack is JSON, gzipped: "lines", which states share, and "states", the places of a control's values -> numbers of lines: the
sentence, all in words, the names of idle controls, the tiles, and the picture's SVG. A refused setting has only three.
"""

import gzip
import hashlib
import html
import importlib
import io
import itertools
import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from importlib.metadata import version
from math import prod
from multiprocessing import get_context
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKS = ROOT / "build" / "packs"
NAMES = ["hardware", "stepper", "collectives", "data_parallel", "zero", "checkpointing", "pipeline", "tensor", "context"]
NAMES += ["expert", "mfu", "nd", "kernels", "failures"]
MOST, BYTES, FEWEST = 1000, 600_000, 6
_PACKAGES = "matplotlib", "numpy", "ipywidgets"
# What the font needs: letters, Greek, punctuation, sub- and superscripts, arrows, signs.
_LETTERS = (range(0x20, 0x180), range(0x370, 0x400), range(0x2010, 0x20A0), range(0x2190, 0x2270), range(0x25A0, 0x2720))
_NUMBER = re.compile(r"-?\d+\.\d+")
_PLACES = re.compile(r' (?:d|x|y|width|height|transform)="[^"]*"')
_BOX = re.compile(r"M (\S+) (\S+) L (\S+) \2 L \3 (\S+) L \1 \4 z ?")
_ANCHORS = {0: "start", 0.5: "middle", 1: "end"}


def fresh(made: dict) -> bool:
    """Whether all that a pack was made from is as it was."""
    return all((ROOT / name).exists() and digest(ROOT / name) == before for name, before in made["files"].items())


def made(name: str) -> dict | None:
    """Returns what described says of an explorer; None where its pack isn't there, or its sources have changed since."""
    path = PACKS / f"{name}.json"
    read = json.loads(path.read_text()) if path.exists() else None
    return read if read and fresh(read) else None


def main(most: int) -> None:
    PACKS.mkdir(parents=True, exist_ok=True)
    with ProcessPoolExecutor(os.cpu_count(), get_context("spawn"), max_tasks_per_child=1) as workers:
        for line in workers.map(make, NAMES, itertools.repeat(most)):
            print(line, flush=True)
    for weight in ("", "-Bold"):
        _font(f"DejaVuSans{weight}")


def make(name: str, most: int = MOST) -> str:
    """Writes a pack, unless it's there, and says what it has."""
    path, versions = PACKS / f"{name}.json", [f"{package} {version(package)}" for package in _PACKAGES]
    if (before := made(name)) and before["versions"] == versions and before["most"] >= most:
        return f"{name}: as it was"
    states, few = States(name), most
    while len(pack := states.pack(*(chosen := states.offered(few)))) > BYTES:
        if few < 2:
            raise ValueError(f"{name}: {len(pack):,} bytes with the fewest states; raise BYTES, or draw less")
        few = int(0.9 * few * BYTES / len(pack))
    path.unlink(missing_ok=True)  # it goes with another pack
    path.with_suffix(".pack").write_bytes(pack)
    says = states.described(*chosen)
    about = {"files": _sources(), "versions": versions, "most": most, **says}
    path.write_text(json.dumps(about, indent=0, ensure_ascii=False))
    return f"{name}: {about['states']} states, {chosen[1]} apart, {len(pack):,} bytes"


class States:
    """An explorer's states as SVG. They're the same in whatever order they're drawn."""

    def __init__(self, name: str):
        from manyranks.show import labels, scenario

        self.explorer, labels.Labels.draw = explorer(name), _written(labels)
        self.name, self.text = name, repr(self.explorer)
        self.explorer.figure.set_dpi(72)  # SVG's
        self.explorer._drawn, self._fixed, self.seen = self._nothing, (), {}
        self.options = {key: _options(control, scenario) for key, control in self.explorer.controls.items()}
        first = self.explorer._first
        self.starts = [first, *(first | values for values in self.explorer.presets.values())]

    def offered(self, most: int) -> tuple[dict[str, list], int]:
        """Returns the values of each control that the page offers, and how many controls may differ from the first values.

        Left out is also what moves other controls, as nd's planner does.
        """
        longest = max(map(len, self.options.values()))
        for radius in (2, 1):
            for few in range(longest, 1, -1):
                values = {key: self._thinned(key, few) for key in self.options}
                more = [len(each) - 1 for each in values.values()]
                count = sum(map(prod, itertools.chain(*(itertools.combinations(more, k) for k in range(radius + 1)))))
                if count + (len(self.starts) - 1) * (1 + sum(more)) <= most:
                    break
            if few >= min(FEWEST, longest):
                break
        first = self.starts[0]
        return {key: [value for value in each if self.state(first | {key: value})] for key, each in values.items()}, radius

    def _thinned(self, key: str, few: int) -> list:
        values = [value for _, value in self.options[key]]
        kept = {round(k * (len(values) - 1) / (few - 1)) for k in range(few)} if len(values) > few else range(len(values))
        return [values[k] for k in sorted({*kept, *(values.index(start[key]) for start in self.starts)})]

    def pack(self, offered: dict[str, list], radius: int) -> bytes:
        states = {}
        for values in self.chosen(offered, radius):
            if found := self.state(values):
                states[",".join(str(each.index(values[name])) for name, each in offered.items())] = found
        lines = sorted({line for found in states.values() for line in found})  # what is alike stands together
        at = {line: k for k, line in enumerate(lines)}
        both = {"lines": lines, "states": {key: [at[line] for line in found] for key, found in states.items()}}
        return gzip.compress(json.dumps(both, separators=(",", ":")).encode(), 9, mtime=0)

    def chosen(self, offered: dict[str, list], radius: int) -> Iterator[dict]:
        """The settings, each once."""
        seen = set()
        for start, apart in zip(self.starts, [radius] + [1] * (len(self.starts) - 1), strict=True):
            for names in itertools.combinations(offered, min(apart, len(offered))):
                for each in itertools.product(*(offered[name] for name in names)):
                    values = start | dict(zip(names, each, strict=True))
                    if (key := tuple(values.values())) not in seen:
                        seen.add(key)
                        yield values

    def state(self, values: dict) -> list[str]:
        """The lines of a state; none where a control has moved another one."""
        if (key := tuple(values.values())) not in self.seen:
            explorer = self.explorer
            explorer.said = None  # or tiles would say what was before
            explorer.set(**values)
            idle = " ".join(name for name, control in explorer.controls.items() if control.disabled)
            lines = [explorer._line.value, explorer.status, idle]
            if not explorer.status.startswith("Not possible"):
                lines += [explorer.tiles.value.partition("</style>")[2], *self._svg()]
            self.seen[key] = lines if explorer.values == values else []
        return self.seen[key]

    def _nothing(self):
        """Takes the place of Explorer._drawn."""
        import numpy as np

        return np.zeros((1, 1, 4), np.uint8)

    def _svg(self) -> list[str]:
        figure = self.explorer.figure
        wide, high = 72 * figure.get_size_inches()
        if not self._fixed or figure.stale:
            self._fixed = self._lines(figure.draw)
        moving = self._lines(*(artist.draw for artist in self.explorer._moving))
        return [f'<svg viewBox="0 0 {wide:.5g} {high:.5g}">', *self._fixed, *moving, "</svg>"]

    def _lines(self, *draw) -> list[str]:
        """Returns the lines of SVG that these draw, without those that a browser does not need."""
        import matplotlib
        from matplotlib.backends.backend_svg import RendererSVG

        file = io.StringIO()
        with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": self.name}):
            renderer = RendererSVG(*72 * self.explorer.figure.get_size_inches(), file, metadata={"Date": None})
            for each in draw:
                each(renderer)
            renderer.finalize()
        text = file.getvalue().partition("</metadata>")[2].rpartition("</svg>")[0]
        text = re.sub(r"<!--.*?-->|(?<=<g) id=\"[^\"]*\"|font-family: [^;\"]*;? ?", "", text)
        text = _PLACES.sub(lambda place: _NUMBER.sub(_rounded, place[0].replace("\n", "")), text)
        text = re.sub(r'(?<= d=")[^"]*', relative, text)
        text = re.sub(r"<g/>|<g>\s*</g>", "", text)
        return [line for line in map(str.strip, text.splitlines()) if line]

    def described(self, offered: dict[str, list], radius: int) -> dict:
        """Describes the explorer for build.py: how its notebook has stored it, and the HTML around the picture."""
        line, _, _, tiles, *_ = self.state(self.starts[0])
        count = sum(bool(self.state(values)) for values in self.chosen(offered, radius))
        first, *others = [[each.index(start[name]) for name, each in offered.items()] for start in self.starts]
        buttons = "".join(
            f"<button type='button' data-start='{place}'>{html.escape(name)}</button>"
            for name, place in zip([*self.explorer.presets, "Reset"], [*others, first], strict=True)
        )
        controls = "".join(self._control(name, values, at) for (name, values), at in zip(offered.items(), first, strict=True))
        above = f"""<div class="explorer" data-pack="{self.name}" data-apart="{radius}"><fieldset disabled><div>{controls}</div>
<p>{"Try" * bool(others)} {buttons} <small role="status"></small></p></fieldset><p role="status">{line}</p></div>"""
        says = html.escape(self._says(offered, radius, count))
        below = f"""<div class="below"><div class="tiles">{tiles}</div><p class="plays">{says}</p>
<p class="still">This is a picture: its controls need JavaScript, and pages from a server.</p></div>"""
        return {"states": count, "repr": self.text, "above": above, "below": below}

    def _says(self, offered: dict[str, list], radius: int, count: int) -> str:
        """Says which settings the page has."""
        if len(offered) == 1:
            return f"Here are {count} of {len(next(iter(self.options.values())))} settings, drawn beforehand."
        less = []
        for name, control in self.explorer.controls.items():
            if missing := len(whole := self.options[name]) - len(offered[name]):
                less.append(f"{control.description} ({missing} of {len(whole)})")
        says = f"Here are {count:,} settings, drawn beforehand"
        if radius == 2:
            says += ": at most two controls differ from Reset, or one from another button; one more undoes the oldest change"
        else:
            says += ": one control at a time differs from the button taken last; the next one undoes its change"
        says += f". Values left out: {', '.join(less)}" if less else ""
        return f"{says}. In JupyterLab everything combines, and real ranks measure."

    def _control(self, name: str, values: Sequence, at: int) -> str:
        shown = {value: text for text, value in self.options[name]}
        label, texts = html.escape(self.explorer.controls[name].description), [shown[value] for value in values]
        data = f'name="{name}" data-first="{at}" data-label="{label}"'
        if type(self.explorer.controls[name]).__name__ == "Dropdown":
            options = "".join(
                f"<option value={k}{' selected' * (k == at)}>{html.escape(text)}</option>" for k, text in enumerate(texts)
            )
            return f"<label>{label}<select {data}>{options}</select></label>"
        data += f' data-texts="{html.escape(json.dumps(texts, ensure_ascii=False))}"'
        slider = f'<input type="range" {data} min="0" max="{len(values) - 1}" value="{at}">'
        return f"<label>{label}<output>{html.escape(texts[at])}</output>{slider}</label>"


def explorer(name: str):
    """The explorer as its notebook opens it."""
    return stepper() if name == "stepper" else importlib.import_module(f"manyranks.show.{name}").explorer()


def stepper():
    """Chapter 01's explorer of a ring's rounds, which has 4 ranks of 4 numbers reduce-scatter."""
    import torch

    from manyranks.show import collectives

    ranks, held, rounds = range(4), [[torch.tensor([1, 2, 3, 4]) * 10**rank for rank in range(4)]], []
    for step in range(3):
        after = [row.clone() for row in held[-1]]
        for rank in ranks:
            chunk = (rank - 1 - step) % 4
            after[(rank + 1) % 4][chunk] += held[-1][rank][chunk]
        held.append(after)
        rounds.append([(rank, (rank + 1) % 4, 8) for rank in ranks])
    return collectives.stepper(rounds, held)


def _written(labels):
    """Labels.draw that writes text in SVG, not its outlines."""
    drawn = labels.Labels.draw

    def draw(words, renderer) -> None:
        from matplotlib.colors import to_hex

        if not hasattr(renderer, "writer"):
            return drawn(words, renderer)
        if not words.get_visible():
            return None
        places, colors = words.get_offset_transform().transform(words.get_offsets()), words.get_facecolors()
        for k, (text, (x, y)) in enumerate(zip(words.texts, places, strict=True)):
            color = to_hex(colors[k % len(colors)], keep_alpha=True).removesuffix("ff")
            look = f"font-size: {words.size:g}px; text-anchor: {_ANCHORS[words.left]}; fill: {color}"
            bold = "font-weight: 700; " if words.weight == "bold" else ""
            base = renderer.height - y + labels._digit_height(words.size) / 2
            if x == x and y == y:
                renderer.writer.element("text", text, attrib={"x": f"{x:.2f}", "y": f"{base:.2f}", "style": bold + look})

    return draw


def _options(control, scenario) -> list[tuple[str, object]]:
    """A control's values, each with its text."""
    if hasattr(control, "options"):
        return [each if isinstance(each, tuple) else (str(each), each) for each in control.options]
    return [(f"{value}", value) for value in scenario.values(control)]


def _rounded(number: re.Match) -> str:
    return _short(value := float(number[0]), 2 if abs(value) < 10 else 1)


def _short(value: float, digits: int) -> str:
    return f"{round(value, digits) + 0.0:.{digits}f}".rstrip("0").rstrip(".")


def relative(path: re.Match) -> str:
    """A path of boxes, each from the one before: many repeat then."""
    if _BOX.sub("", path[0]) or not path[0]:
        return path[0]
    boxes = [tuple(map(float, box)) for box in _BOX.findall(path[0])]
    found, before = [], (0.0, 0.0)
    for x, y, right, low in boxes:
        across, down, wide, high = (_short(each, 2) for each in (x - before[0], y - before[1], right - x, low - y))
        found.append(f"m{across} {down}h{wide}v{high}h{_short(x - right, 2)}z")
        before = x, y
    return "".join(found)


def _sources() -> dict[str, str]:
    """The digests of all files that have had a part: modules, and what lies beside them without being one."""
    loaded = [
        Path(module.__file__) for key, module in [*sys.modules.items()] if key.startswith("manyranks") and module.__file__
    ]
    tables = (
        path for folder in {path.parent for path in loaded} for path in folder.iterdir() if path.suffix in (".csv", ".mplstyle")
    )
    files = {Path(__file__).resolve(), *(path.resolve() for path in (*loaded, *tables))}
    return {path.relative_to(ROOT).as_posix(): digest(path) for path in sorted(files)}


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def _font(name: str) -> None:
    """Writes Matplotlib's font with the letters that pictures have, for pictures were laid out with it."""
    import matplotlib
    from fontTools import subset

    options = subset.Options(flavor="woff", layout_features=["kern"], hinting=False, drop_tables=["FFTM"])
    font = subset.load_font(str(Path(matplotlib.get_data_path(), "fonts", "ttf", f"{name}.ttf")), options)
    letters = subset.Subsetter(options)
    letters.populate(unicodes=itertools.chain(*_LETTERS))
    letters.subset(font)
    subset.save_font(font, str(PACKS / f"{name}.woff"), options)


if __name__ == "__main__":
    os.environ["MANYRANKS_SETTINGS"] = "off"
    main(int(sys.argv[1]) if len(sys.argv) > 1 else MOST)
