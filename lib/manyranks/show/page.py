"""The parts of an explorer on a page: HTML, its styles, and the few lines of JavaScript that ipywidgets doesn't have."""

import base64
import html
import math
import re
from collections.abc import Iterable

from manyranks.measure.compared import SmallRun
from manyranks.show import scenario, units
from manyranks.show.scenario import Cost, Scenario
from manyranks.show.setting import Said
from manyranks.theory.published import confidence, peak_confidence

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
.manyranks-explorer .jupyter-button { padding: 0 7px; font-size: 12px; }
/* A control's name and value stand above it: five in a row on a laptop, and each slider is 140 pixels wide at least. */
.manyranks-explorer .manyranks-controls { column-gap: 12px; overflow: visible; }
.manyranks-controls > .widget-inline-hbox { flex: 1 1 152px; max-width: 240px; height: 36px; margin: 0;
    flex-wrap: wrap; }
.manyranks-controls .noUi-target { top: 2px; } /* or the handle would touch the name */
.manyranks-controls .noUi-handle { width: 13px; height: 13px; top: -5px; right: -7px; }
.manyranks-controls .widget-label { flex: 1 1 0; height: 17px; margin: 0;
    font-size: 11px; line-height: 17px; text-align: left; }
.manyranks-controls .widget-dropdown .widget-label { flex: 1 0 100%; }
.manyranks-controls .widget-readout { flex: none; width: auto; min-width: 0; height: 17px; margin: 0; padding: 0 0 0 4px;
    order: 1; line-height: 17px; font-size: 11px; text-align: right; border: none; }
.manyranks-controls .slider-container { flex: 1 0 calc(100% - 10px); order: 2; height: 18px; min-width: 0; margin: 0 5px; }
.manyranks-controls select { flex: 1 0 100%; height: 20px; padding: 0 4px; font-size: 12px; }
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
.manyranks-tiles { display: flex; gap: 3px; margin-bottom: 3px; line-height: 1.2; font-size: 12px; }
.manyranks-tiles > div { flex: 1 1 auto; padding: 1px 5px 2px; border: 1px solid #78787860;
    border-radius: 4px; } /* as wide as what it says, which takes a second line where a row is full */
.manyranks-tiles small { opacity: .8; font-size: 11px; }
.manyranks-tiles :is(b, small) { display: inline-block; }
.manyranks-tiles > div > small:first-child { display: block; }
.manyranks-tiles i { display: block; height: 3px; margin-top: 1px; background: #0072B2; min-width: 1px; }
.manyranks-tiles i + i { background: #787878; }
</style>"""
_SHARE = re.compile(r"([\d.,]+)(?: (\w+))? of [\d.,]+ (\w+)")
_UNITS = {"bytes": units.size, "seconds": units.duration, "share": units.percent, "number": units.three, "flops": units.flops}


def tiles(said: Said, before: Said | None = None) -> str:
    """HTML of the numbers, each with its value in the setting before: a row of the chapter's own, and the strip."""
    old = {} if before is None else before.numbers
    own = [_tile(name, text, old.get(name, text)) for name, text in said.numbers.items()]
    if said.scenario is None:
        return _row(own)
    cost = said.scenario.cost
    past = before.scenario.cost if before is not None and before.scenario else None
    strip = _row([_compared(name, cost, past) for name in scenario.STRIP])
    return _row(own) + strip + small_print(f"{_sure(said.scenario)} {said.note}".strip())


def _sure(now: Scenario) -> str:
    """Says how sure the strip's time and memory are."""
    time, held = confidence(now.time), peak_confidence(now.shape, now.plan)
    tight = f"; the plan {now.tight}" if now.tight else ""
    if time.missing and held.missing:
        return f"Step time and memory are predictions, {time}{tight}."
    memory = "the memory isn't checked" if held.missing else f"the memory is one, {held}"  # why not would take a second line
    return f"The step time is a prediction, {time}; {memory}{tight}."


def parts(old: str, new: str) -> list[tuple[str, str]]:
    """Returns the parts of the new text, each with what it was, as short as that makes sense; "" where it's the same.

    "44.1 GB, 1.5 × data parallelism" after "29.4 GB, 1 × data parallelism": 44.1 GB was 29.4, and 1.5 was 1.
    """
    joint = " + " if " + " in old else ", "
    before, now = old.split(joint), new.split(joint)
    if len(before) != len(now):
        return [(new, old)]
    ends = [joint] * (len(now) - 1) + [""]
    return [(b + end, _was(a, b) if a != b else "") for a, b, end in zip(before, now, ends, strict=True)]


def _was(old: str, new: str) -> str:
    """Returns the old text without the words that it has in common with the new one, if a number is left, with its unit."""
    if share := _SHARE.fullmatch(old):
        number, own, unit = share.groups()
        changed = own or _SHARE.sub(r"\2", new)  # "24.8" beside "30 of 80 GB", and "24.8 GB" beside "1.13 TB of 80 GB"
        return f"{number} {own or unit}" if changed else number
    before, now = old.split(), new.split()
    for at in (0, -1):
        while before and now and before[at] == now[at]:
            del before[at], now[at]
    return before[0] if len(before) == 1 and len(now) == 1 else old


def _compared(name: str, cost: Cost, past: Cost | None) -> str:
    number, written, _ = scenario.STRIP[name]
    shares = [number(each) for each in (cost, past) if each is not None]
    if name == scenario.STEP:  # in relation to the longer one
        shares = [share / max(shares) for share in shares]
    text, *was = [written(each) for each in (cost, past) if each is not None]
    return _tile(name, text, *was, bars=shares if was and was[0] != text else shares[:1])


def measured(small: SmallRun, said: Said, png: bytes = b"") -> str:
    """HTML of what real ranks have counted, next to theory, above all other numbers: right below the picture.

    png: of it
    """
    found = []
    for name, theory, counted, unit in small.rows:
        written, most = _UNITS[unit], max(theory, counted) or 1.0
        same = "equal" if theory == counted else f"{counted / theory - 1:+.1%}".replace("-", "−") if theory else "theory: 0"
        if math.isnan(counted):
            found.append(_tile(name, "not counted on this system", bars=(0, theory / most), more=f"theory {written(theory)}"))
        else:
            more = f"theory {written(theory)}, {same}"
            found.append(_tile(name, written(counted), bars=(counted / most, theory / most), more=more))
    source = f"data:image/png;base64,{base64.b64encode(png).decode()}"
    picture = f'<div><img alt="what was measured" style="max-width:100%;width:920px" src="{source}"></div>' if png else ""
    return f"<div>{small_print(f'Measured: {small.where}')}</div>{_row(found)}{picture}{tiles(said)}"


def _tile(name: str, text: str, old: str | None = None, bars: Iterable[float] = (), more: str = "") -> str:
    """HTML of a tile.

    old: the text before
    bars: shares of the tile's width
    more: what is beside the number
    """
    drawn = "".join(f'<i style="width:{100 * min(bar, 1.0):.0f}%"></i>' for bar in bars)
    each = parts(text if old is None else old, text)
    said = " ".join(f"<b>{html.escape(part)}</b>" + (f" {small_print(f'(was {was})')}" if was else "") for part, was in each)
    return f"<div>{small_print(name)}{said} {small_print(more)}{drawn}</div>"


def _row(found: list[str]) -> str:
    return f'<div class="manyranks-tiles">{"".join(found)}</div>' if found else ""


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
    return f"<small>{html.escape(text)}</small>" if text else ""
