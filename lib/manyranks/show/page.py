"""What an explorer is on a page: HTML, its styles, and the few lines of JavaScript that ipywidgets doesn't have."""

import html
import itertools
import re
from collections.abc import Iterable

from manyranks.measure.beside import Small
from manyranks.show import scenario, units
from manyranks.show.said import Said
from manyranks.show.scenario import Cost
from manyranks.theory.published import confidence

# JupyterLab and Notebook 7 take arrows, letters and Enter for themselves, unless the element that has the focus has this
# attribute. Keys with Ctrl, Cmd or Shift, such as those that save or run, stay theirs. The rest is for screen readers: a
# slider has a name, and the status line is spoken when it changes. In the dark theme a list's arrow is black on black.
KEYS = """<style onload="
    const box = this.closest('.manyranks-explorer');
    const keep = ({target, ctrlKey, metaKey, shiftKey}) => {
        target.toggleAttribute('data-lm-suppress-shortcuts', !(ctrlKey || metaKey || shiftKey));
        if (target.role !== 'slider') return;
        const row = target.closest('.widget-inline-hbox');
        target.ariaLabel = row.querySelector('label').innerText;
        target.ariaValueText = row.querySelector('.widget-readout').innerText; /* else it's the number of a step */
    };
    for (const type of ['focusin', 'keydown', 'keyup']) box.addEventListener(type, keep);
    box.addEventListener('focusin', ({target}) => {
        box.querySelector(':scope > .widget-html').ariaLive = 'polite';
        if (target.matches('.manyranks-steps .widget-readout')) target.contentEditable = false; /* it takes no number */
    });
">
.manyranks-steps .widget-readout { pointer-events: none; } /* what is typed there does nothing */
.manyranks-explorer > .widget-html .widget-html-content { line-height: 1.35; }
[data-jp-theme-light="false"] .manyranks-explorer select { appearance: auto; background-image: none; color-scheme: dark; }
</style>"""
# A saved page keeps a picture, this note and the controls. The controls are alive as long as the kernel is: then they alone
# are to be seen, else the picture and the note. A page that drops styles, such as GitHub's, shows picture and note.
NOTE = """<style>
.jp-OutputArea:has(.manyranks-explorer) > .jp-OutputArea-child:has(.manyranks-note),
.jp-OutputArea:has(.manyranks-explorer) > .jp-OutputArea-child:has(+ .jp-OutputArea-child .manyranks-note),
.jp-OutputArea:not(:has(.manyranks-explorer)) > .jp-OutputArea-child:has(.manyranks-note) + .jp-OutputArea-child
{ display: none; }
</style><p class="manyranks-note"><i>%s</i></p>"""
# The picture, and on it the parts that say their numbers.
PICTURE = """<style>
.manyranks-picture { position: relative; display: block; overflow: visible; width: fit-content; }
.manyranks-picture > .widget-html { position: absolute; inset: 0; height: auto; pointer-events: none; margin: 0; }
.manyranks-picture .widget-html-content { position: absolute; inset: 0; }
.manyranks-picture img { margin: 0; } /* or the page could be moved sideways by 4 pixels */
[data-jp-theme-light="false"] .manyranks-picture img { filter: brightness(1.1); }
.manyranks-picture s { position: absolute; pointer-events: auto; text-decoration: none; }
.manyranks-picture s:is(:hover, :focus) { outline: 2px solid #787878; z-index: 9; }
.manyranks-picture s:is(:hover, :focus)::after { content: attr(data-says); position: absolute; left: 0; bottom: 100%;
    padding: 1px 6px; background: #111111; color: #ffffff; font-size: 12px; white-space: nowrap; border-radius: 3px; }
.manyranks-picture s.manyranks-right::after { left: auto; right: 0; }
</style>"""
_COPY = """<button class="jupyter-button" style="height: 24px; margin: 4px 1px 0; line-height: 22px"
 title="Copies the Python that computes these numbers" onclick="
    const text = this.dataset.code;
    const copied = () => { this.textContent = 'Copied'; setTimeout(() => { this.textContent = 'Copy as code'; }, 1500); };
    const byHand = () => {
        const area = document.body.appendChild(document.createElement('textarea'));
        area.value = text; area.select(); document.execCommand('copy'); area.remove(); copied();
    };
    navigator.clipboard ? navigator.clipboard.writeText(text).then(copied, byHand) : byHand();
" data-code="%s">Copy as code</button>"""
# A tile: its number, the one before, and a bar for each. Colors are the page's, so that they are right in both themes.
TILES = """<style>
.manyranks-tiles { display: flex; flex-wrap: wrap; gap: 3px; margin-bottom: 3px;
    line-height: 1.2; font-size: 12px; }
.manyranks-tiles > div { flex: 1 1 150px; padding: 1px 6px 2px; border: 1px solid #78787860; border-radius: 4px;
    white-space: nowrap; overflow: hidden; text-overflow: ellipsis; }
.manyranks-tiles.manyranks-whole > div { white-space: normal; } /* below all else, so it may grow */
.manyranks-tiles small { opacity: .8; font-size: 11px; } .manyranks-tiles b { margin-right: 5px; }
.manyranks-tiles > div > small:first-child { display: block; }
.manyranks-tiles i { display: block; height: 3px; margin-top: 1px; background: #0072B2; min-width: 1px; }
.manyranks-tiles i + i { background: #787878; }
</style>"""
_SHARE = re.compile(r"([\d.,]+)(?: (\w+))? of [\d.,]+ (\w+)")
_UNITS = {"bytes": units.size, "seconds": units.duration, "share": scenario.percent, "number": units.three}


def tiles(said: Said, before: Said | None = None) -> str:
    """HTML of the numbers, each with that of the setting before it: a row of the chapter's own, and the strip."""
    old = {} if before is None else before.numbers
    own = [
        _tile(name, text, f"was {gone(old[name], text)}" if old.get(name, text) != text else "")
        for name, text in said.numbers.items()
    ]
    if said.scenario is None:
        return _row(own)
    cost, past = said.scenario.cost, before.scenario.cost if before is not None and before.scenario else None
    strip = _row([_compared(name, cost, past) for name in scenario.STRIP])
    return (
        _row(own) + strip + small_print(f"The step time is a prediction, {confidence(said.scenario.time)}. {said.note}".strip())
    )


def gone(old: str, new: str) -> str:
    """Returns the parts of the old text that have changed, each as short as it can be and still make sense alone.

    "work 24 + bubble 9" beside "work 24 + bubble 17" is "bubble 9", and "63.8 × one GPU" beside "877 × one GPU" is "63.8 ×".
    """
    joint = " + " if " + " in old else ", "
    parts, now = old.split(joint), new.split(joint)
    if len(parts) != len(now):
        return old
    said = joint.join(_short(a, b) for a, b in zip(parts, now, strict=True) if a != b)
    return old if len(parts) > 1 and re.fullmatch(r"[\d.,]+", said) else said  # a number alone could be any of the parts


def _short(old: str, new: str) -> str:
    """Returns the old text without the words at its end that the new one ends in, too. A number keeps its unit."""
    if share := _SHARE.fullmatch(old):
        number, own, unit = share.groups()
        units = own or _SHARE.sub(r"\2", new)  # "24.8" beside "30 of 80 GB", and "24.8 GB" beside "1.13 TB of 80 GB"
        return f"{number} {own or unit}" if units else number
    before, now = old.split(), new.split()
    alike = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(before[::-1], now[::-1], strict=False))
    kept = len(before) - len(list(alike))
    if kept == 0 or re.search(r"[\d()]", " ".join(before[kept:])):
        return old
    return " ".join(before[: kept + before[kept - 1][-1].isdigit()])


def _compared(name: str, cost: Cost, past: Cost | None) -> str:
    number, written = scenario.STRIP[name]
    shares = [number(each) for each in (cost, past) if each is not None]
    if name == scenario.STEP:  # in relation to the longer one
        shares = [share / max(shares) for share in shares]
    text, *was = [written(each) for each in (cost, past) if each is not None]
    changed = was != [] and was[0] != text
    return _tile(name, text, f"was {gone(was[0], text)}" if changed else "", shares if changed else shares[:1])


def measured(small: Small, said: Said) -> str:
    """HTML of what real ranks have counted, next to theory, below all other numbers."""
    parts = []
    for name, theory, counted, unit in small.rows:
        written, most = _UNITS[unit], max(theory, counted) or 1.0
        same = "equal" if theory == counted else f"{counted / theory - 1:+.1%}".replace("-", "−") if theory else "theory: 0"
        parts.append(_tile(name, written(counted), f"theory {written(theory)}, {same}", (counted / most, theory / most)))
    return f"{tiles(said)}<div>{small_print(f'Measured: {small.where}')}</div>{_row(parts, 'manyranks-whole')}"


def faded(tiles: str) -> str:
    """HTML of tiles that no longer belong to the controls."""
    return f'<div style="opacity:.3">{tiles}</div>'


def _tile(name: str, text: str, more: str = "", bars: Iterable[float] = ()) -> str:
    """bars: shares of the tile's width."""
    drawn = "".join(f'<i style="width:{100 * min(bar, 1.0):.0f}%"></i>' for bar in bars)
    whole = html.escape(f"{name}: {text} {more}".strip())  # for a tile that is too narrow
    return f'<div title="{whole}">{small_print(name)}<b>{html.escape(text)}</b> {small_print(more)}{drawn}</div>'


def _row(parts: list[str], more: str = "") -> str:
    return f'<div class="{f"manyranks-tiles {more}".strip()}">{"".join(parts)}</div>' if parts else ""


def with_limit(status: str) -> str:
    """Returns HTML of a sentence, with what limits in bold."""
    said = html.escape(status)
    return re.sub(r"Limit: .*?\.(?=\s|$)", r"<b>\g<0></b>", said) if "Limit: " in said else f"<b>{said}</b>"


def box(left: float, right: float, bottom: float, top: float, says: str) -> str:
    """HTML of a part of the picture that says this; places are shares of the picture, which a narrow page shrinks."""
    place = f"left:{left:.2%};width:{right - left:.2%};bottom:{bottom:.2%};height:{top - bottom:.2%}"
    side = ' class="manyranks-right"' if left > 0.5 else ""
    return f'<s{side} tabindex="-1" style="{place}" data-says="{html.escape(says)}"></s>'


def copies(code: str) -> str:
    """HTML of a button that copies this; nothing for nothing."""
    return _COPY % html.escape(code) if code else ""


def small_print(text: str) -> str:
    """HTML of a text in small letters."""
    return f"<small>{html.escape(text)}</small>" if text else ""
