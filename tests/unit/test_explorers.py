"""Parts that explorers share: the scenario that is carried, tiles, presets, parts with numbers, and "Measure it"."""

import asyncio
import inspect
import json
import random
import re
from collections import namedtuple

import pytest

from manyranks import show
from manyranks.measure.compared import Compared, SmallRun
from manyranks.show import page, scenario, units
from manyranks.show.data_parallel import Scaling
from manyranks.show.scenario import Scenario, controls
from manyranks.show.setting import Said, Setting
from manyranks.theory import Plan, clusters, links, memory, models, step
from tests.drawn import drawings, named, words
from tests.said import NAMES, SAID, says
from tests.unit import smallest_explorer
from tests.unit.figures_drawn import assert_all_readable

SCENARIO = Scenario(models["llama3-8b"], Plan(dp=64, zero=3, seq=1024), clusters["h100-dgx"])


class Plot(show.hardware.MessageTime):
    """Chapter 00's plot with shared controls and a private one."""

    def __init__(self):
        super().__init__(links)

    def code(self, **values):
        return ""

    def update(self, dp, seq, n):
        if dp * seq > 2**20:
            raise ValueError("too many")
        super().update("NVLink, H100", size=n, n=8)
        plan = Plan(dp=dp, seq=seq, zero=3)
        return Said(f"d = {dp}", {"n": f"{n} B"}, "nothing", scenario=Scenario(models["llama3-8b"], plan, clusters["h100-dgx"]))


def explorer(measure=None):
    presets = {"eight": {"dp": 8}}
    return show.Explorer(Plot(), presets, measure, **controls(dp=64, seq=1024), n=show.log_slider("n", 2**20, 0, 34))


@pytest.fixture
def settings(tmp_path, monkeypatch):
    """Where a reader's own settings are, in a notebook."""
    monkeypatch.setenv("MANYRANKS_SETTINGS", "")
    monkeypatch.setenv("JUPYTER_CONFIG_DIR", str(tmp_path / "config"))
    return tmp_path / "config" / "manyranks_scenario.json"


async def moved(shown, **values):
    """As by hand, in a notebook."""
    for name, value in values.items():
        shown.controls[name].value = value
    await asyncio.sleep(0.1)


def test_a_scenario_costs_what_the_theory_says():
    time, peak = (f(SCENARIO.shape, SCENARIO.plan, *rest) for f, *rest in ((step.estimate, SCENARIO.cluster), (memory.peak,)))
    assert SCENARIO.cost == (peak.total, 80e9, 0, time.data / time.seconds, time.seconds, time.mfu)


@pytest.mark.parametrize("shape", [models["llama3-8b"], scenario.SMALL])
@pytest.mark.parametrize("on", [clusters["h100-dgx"], clusters["gb200-nvl72"].with_nodes_of(64)])
def test_its_code_computes_the_same(shape, on, capsys):
    plan = Plan(dp=8, tp=2, seq=128, zero=2, recompute="none")
    exec(Scenario(shape, plan, on).code(), {})
    said = dict(line.split(": ") for line in capsys.readouterr().out.splitlines())
    time, peak = step.estimate(shape, plan, on), memory.peak(shape, plan)
    assert said["memory per GPU"] == show.size(peak.total)
    assert (said["step time"], said["MFU"]) == (show.duration(time.seconds), units.percent(time.mfu))


def test_the_tiles_show_this_setting_beside_the_one_before():
    shown = explorer()
    assert "was" not in shown.tiles.value
    shown.set(dp=128, n=4)
    assert "<b>4 B</b> <small>(was 1048576)</small>" in shown.tiles.value
    assert "<small>memory per GPU</small><b>6.14 of 80 GB</b> <small>(was 7.15)</small>" in shown.tiles.value
    assert shown.tiles.value.count("<i ") == 5 + 3  # a bar for each of the strip; memory, communication and MFU as they were
    assert shown.status == "d = 128: n 4 B. Limit: nothing."


def test_a_preset_starts_from_the_defaults_and_an_unknown_one_is_refused():
    shown = explorer().set(seq=128)
    assert shown.preset("eight").values == {"dp": 8, "seq": 1024, "n": 2**20}
    with pytest.raises(ValueError, match="'nine': the presets are eight"):
        shown.preset("nine")


def test_what_is_set_by_hand_opens_the_next_explorer_and_reset_forgets_it(settings):
    async def notebook():
        await moved(explorer(), dp=256, n=8)
        assert json.loads(settings.read_text()) == {"dp": 256}  # n is nobody else's
        second = explorer()
        assert second.values == {"dp": 256, "seq": 1024, "n": 2**20}
        assert "data ranks d = 256" in second.carried.value
        assert "was" not in second.tiles.value
        assert second.set(seq=2048).carried.value == ""  # the line is about how it opened
        second.reset()
        assert second.values["dp"] == explorer().values["dp"] == 64

    asyncio.run(notebook())


@pytest.mark.parametrize("kept", ['{"dp": 1024, "seq": 65536}', '{"dp": 3}', '{"dp": [1]}', "[1]", "no JSON"])
def test_what_cannot_be_here_is_not_carried(settings, kept):
    async def notebook():
        settings.parent.mkdir()
        settings.write_text(kept)
        assert explorer().values == {"dp": 64, "seq": 1024, "n": 2**20}

    asyncio.run(notebook())


def test_tests_and_plain_python_start_at_the_defaults(settings, monkeypatch):
    settings.parent.mkdir()
    settings.write_text('{"dp": 8}')
    assert explorer().values["dp"] == 64  # no notebook around it
    monkeypatch.setenv("MANYRANKS_SETTINGS", "off")

    async def notebook():
        await moved(explorer(), dp=128)
        assert explorer().values["dp"] == 64

    asyncio.run(notebook())
    assert settings.read_text() == '{"dp": 8}'


def test_a_part_lies_where_the_picture_has_it():
    plot = Scaling()
    shown = show.Explorer(plot, **show.data_parallel.explorer().controls)
    first = next(plot.parts())
    (left, bottom), (right, _) = first.axes.transData.transform([(first.left, first.bottom), (first.right, first.top)])
    wide, high = plot.figure.bbox.size
    assert f"left:{left / wide:.2%};width:{(right - left) / wide:.2%};bottom:{bottom / high:.2%}" in shown.parts.value
    assert 'data-says="overlapped, compute: 194 ms"' in shown.parts.value
    assert named(first.axes, "compute")


class Counted:
    """The function that "Measure it" runs in these tests: it waits until it's stopped, if it's told so."""

    def __init__(self, waits=False, fails=""):
        self.waits, self.fails, self.stopped = waits, fails, False

    def __call__(self, values, say):
        say(0.5, "half of it")
        while self.waits and not self.stopped:
            pass
        if self.fails:
            raise RuntimeError(self.fails)
        return SmallRun(f"{values['dp']} ranks", (Compared("sent", 100, 101), Compared("held", 8, 8, "number")))

    def stop(self):
        self.stopped = True


def test_what_was_measured_stands_beside_theory():
    shown = explorer(Counted())
    assert shown.measured().rows[0].measured == 101
    assert "64 ranks" in shown.tiles.value
    assert "<b>101 B</b> <small>theory 100 B, +1.0%</small>" in shown.tiles.value
    assert "theory 8, equal" in shown.tiles.value
    assert "<small>Measured: " in shown.tiles.value
    assert "Measured" not in shown.set(dp=8).tiles.value
    with pytest.raises(ValueError, match="nothing to measure"):
        explorer().measured()


@pytest.mark.parametrize(
    ("counted", "stop", "words"),
    [
        (Counted(), False, ""),
        (Counted(fails="rank 1 died\nand more"), False, "Not measured: rank 1 died"),
        (Counted(waits=True), True, "stopped"),
    ],
)
def test_the_button_runs_in_the_background_and_a_failure_is_a_sentence(counted, stop, words):
    async def notebook():
        shown = explorer(counted)
        start, _ = shown.buttons().children[-2:]
        start.click()
        assert start.description == "Stop"
        assert shown.bar.layout.display is None
        if stop:
            start.click()
        for _ in range(200):
            await asyncio.sleep(0.01)
            if start.description == "Measure it":
                break
        assert (start.description, shown.bar.layout.display) == ("Measure it", "none")
        assert words in shown.carried.value
        assert ("64 ranks" in shown.tiles.value) == (not words)

    asyncio.run(notebook())


def test_what_is_not_possible_is_not_measured():
    shown = explorer(Counted()).set(dp=1024, seq=65536)
    start, _ = shown.buttons().children[-2:]
    start.click()
    assert (start.description, "this setting isn&#x27;t possible" in shown.carried.value) == ("Measure it", True)


class Ways(namedtuple("Ways", "tp z"), Setting):
    """A setting that costs 100 / t + z, and fits where t·(1 + z) is 8 at least; t = 4 can't be."""

    choices, remedies, room = {"tp": (1, 2, 4, 8), "z": (0, 3)}, {"time": ("tp",)}, ("z", "tp")
    possible = property(lambda self: self.tp != 4)
    fits = property(lambda self: self.tp * (1 + self.z) >= 8)
    cost = property(lambda self: 100 / self.tp + self.z)


def test_a_setting_finds_a_way_out_of_one_control():
    now = Ways(2, 0)
    assert now.faster("time") == (8, 0)
    assert now.takes("time", "{:g} s".format) == "; with TP 8: 12.5 s"
    assert now.fitting() == (2, 3)
    assert now.memory("nothing helps") == "memory; 3 fits"
    assert Ways(8, 0).faster("time") is None
    assert now.faster("memory") is None
    assert Ways(1, 0).fitting() == (8, 0)


EXPLORERS = {name: getattr(show, name).explorer for name in NAMES}


WITHOUT_CURVES = ("hardware", "collectives", "kernels", "failures")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.usefixtures("undrawn")
def test_it_says_what_the_table_has(name):
    assert says(name) == SAID[name]


CROWDED = {"nd": [{"batch": 16384}], "context": [{"cp": 16, "layout": "zigzag"}], "tensor": [{"cluster": "b200-dgx", "tp": 16}]}
CROWDED["collectives"] = [{"n": n} for n in (2, 16, 64)]


@pytest.mark.parametrize("name", NAMES)
def test_no_text_is_on_another_or_cut_off(name):
    for crowded in CROWDED.get(name, [{}]):
        assert_all_readable(EXPLORERS[name]().set(**crowded).figure)


# Explorer -> what it says of settings that cannot be; the others can show all.
REFUSED = {
    "collectives": r"needs|has no|has only|isn't timed|at least 1",
    "data_parallel": "has only",
    "zero": "lower K or raise d",
    "checkpointing": "choose ",
    "tensor": r"does not divide|lower p|has only",
    "context": r"Ulysses needs|has only|exchange heads|does not divide",
    "expert": r"evenly divide|does not divide|give 1|allow more|lower|imbalance|raise|needs",
    "mfu": "positions|does not divide|no products|no scales|has only|layers of|not a multiple|parallelism only",
    "nd": "lower|choose|take|say|set|use|give|[Rr]aise",
    "kernels": "needs|at most|no rate",
    "failures": "a write must end",
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.usefixtures("undrawn")
def test_every_choice_is_shown_or_refused_with_a_reason(name):
    shown, chosen = EXPLORERS[name](), random.Random(9)
    options = {each: scenario.values(control) for each, control in shown.controls.items()} | {"best": ["off"]}
    options = {each: options[each] for each in shown.controls}  # the planner is searched elsewhere
    settings = [{each: chosen.choice(values) for each, values in options.items()} for _ in range(60)]
    settings += [{each: chosen.choice([values[0], values[-1]]) for each, values in options.items()} for _ in range(60)]
    settings += [shown.values | {each: value} for each, values in options.items() for value in values]
    said, reasons = [], []
    for setting in settings:
        shown.plot.idle(**setting)
        try:
            said.append(shown.plot.update(**setting))
        except ValueError as error:
            reasons.append(str(error))
    assert all(each.limit and not re.search(r"\bnan\b|\binf\b", str(each)) for each in said)
    assert len(said) >= 40
    assert [each for each in reasons if not re.search(REFUSED.get(name, "^$"), each)] == []


LOOKED_UP = {("hardware", "link"), ("collectives", "operation"), ("pipeline", "model"), ("pipeline", "cluster")}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.usefixtures("undrawn")
def test_what_no_control_has_is_refused_in_words(name):
    shown = EXPLORERS[name]()
    for each, control in shown.controls.items():
        if isinstance(control.value, str) and each != "best" and (name, each) not in LOOKED_UP:
            with pytest.raises(ValueError, match="abacus"):
                shown.plot.update(**shown.values | {each: "abacus"})


@pytest.mark.parametrize("name", NAMES)
def test_parts_say_numbers_and_lie_in_the_picture_and_axes_are_never_drawn_again(name):
    shown = EXPLORERS[name]()
    parts = list(shown.plot.parts())
    assert all(re.search(r"\d", each.says) for each in parts)
    assert len(parts) < 200
    for each in parts:
        corners = each.axes.transData.transform([(each.left, each.bottom), (each.right, each.top)])
        assert (corners >= -1).all()
        assert (corners <= [*shown.figure.bbox.size + 1]).all()
    drawn, before = drawings(shown.figure), shown.png
    for preset in shown.presets:
        shown.preset(preset)
    assert shown.png != before
    assert not drawn


@pytest.mark.parametrize("name", EXPLORERS)
@pytest.mark.usefixtures("undrawn")
def test_its_code_prints_the_numbers_that_it_shows(name, capsys):
    shown = EXPLORERS[name]()
    for preset in ("", *shown.presets):
        (shown.preset(preset) if preset else shown.reset())
        if shown.status.startswith("Not possible"):
            continue
        exec(shown.code(), {})
        printed = dict(line.split(": ", 1) for line in capsys.readouterr().out.splitlines())
        texts = dict(shown.said.numbers)
        if shown.said.scenario is not None:
            texts |= {each: how(shown.said.scenario.cost) for each, (_, how, _) in scenario.STRIP.items()}
            assert set(scenario.STRIP) <= set(printed)
        assert len(printed) >= 3
        for each, text in printed.items():
            assert starts(numbers(text), numbers(texts[each])), (preset, each, text, texts[each])
        assert len(shown.code().splitlines()) <= 30


def numbers(text):
    """Each number with its unit."""
    return re.findall(r"[\d.,]*\d", text.replace(",", ""))


def starts(first, whole):
    return bool(first) and whole[: len(first)] == first


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.usefixtures("undrawn")
def test_curves_are_what_the_strip_says_of_each_degree(name):
    shown = EXPLORERS[name]()
    plot, curves = shown.plot, shown.curves
    assert (curves is None) == (name in WITHOUT_CURVES)
    if name in WITHOUT_CURVES:
        return
    for control, degrees in curves.controls.items():
        assert len(degrees) >= 4
        costs, now, degree = plot.along(control, degrees, **shown.values)
        assert now == shown.said.scenario.cost
        for other, cost in zip(degrees, costs, strict=True):
            if cost is not None and control in shown.values and other != degree:
                assert shown.set(**{control: other}).said.scenario.cost == cost
        shown.reset()
    for each, axes in zip(reversed(plot.curves), shown.figure.axes[-len(plot.curves) :], strict=True):
        assert words(axes, "title")[0].startswith(each.split()[0])
        (x,), (y,) = named(axes, "ring").get_data()
        assert named(axes, "curve").get_ydata()[int(x)] == pytest.approx(y)


def test_html_is_escaped():
    assert "<b>" not in page.box(0, 1, 0, 1, '"><b>')
    assert "<script" not in page.copies("'<script>'")
    assert "<script" not in page.tiles(Said("", {"<script>": "<script>"}))


def test_the_explorer_that_is_copied_for_a_new_one_works_and_is_short():
    shown = smallest_explorer.explorer()
    assert shown.status == "llama3-8b, d = 64: batch 64 sequences. Limit: compute."
    assert "Does not fit. Limit: memory; ZeRO-" in shown.set(zero=0).status
    assert "ZeRO-3, waiting: " in shown.parts.value
    assert "Does not fit. Limit: memory; DP " in shown.preset("one GPU").status
    assert "data ranks d = 64: memory per GPU" in shown.parts.value  # the frame's curves
    assert len([line for line in inspect.getsource(smallest_explorer).splitlines() if line.strip()]) <= 60


@pytest.mark.parametrize(
    ("old", "new", "was"),
    [
        ("63.8 × one GPU", "877 × one GPU", "63.8"),
        ("5.81 days more", "16.8 days more", "5.81"),
        ("work 24 + bubble 9", "work 24 + bubble 17", "|9"),
        ("work 48 + bubble 7", "work 24 + bubble 17", "48|7"),
        ("15 + 3", "15 + 2", "|3"),
        ("work 24 + bubble 9", "work 24 + bubble 0 + late start 7", "work 24 + bubble 9"),
        ("29.4 GB, 1 × data parallelism", "44.1 GB, 1.5 × data parallelism", "29.4|1"),
        ("1.36 ms, 99% of β", "2.7 ms, 99% of β", "1.36|"),
        ("10 (62% of all warps)", "2 (25% of all warps)", "10 (62% of all warps)"),
        ("4,096 in 15.5 waves", "65,536 in 49.6 waves", "4,096 in 15.5 waves"),
        ("2,048 = 128 × 16 × 1", "256 = 16 × 16 × 1", "2,048 = 128 × 16 × 1"),
        ("32 on 4 stages", "32 on all 4 stages", "32 on 4 stages"),  # nothing of it is gone
        ("24.8 of 80 GB", "30 of 80 GB", "24.8"),
        ("49.2 kB of 232 kB", "12.3 kB of 232 kB", "49.2 kB"),
        ("24.8 of 80 GB", "1.13 TB of 80 GB", "24.8 GB"),
        ("1.13 TB of 80 GB", "24.8 of 80 GB", "1.13 TB"),
        ("2.1 GB", "3.1 GB", "2.1"),
        ("2.1 GB", "980 MB", "2.1 GB"),
        ("2.1 GB", "2.1 GB", ""),
    ],
)
def test_a_tile_says_of_each_part_what_it_was(old, new, was):
    found = page.parts(old, new)
    assert "".join(text for text, _ in found) == new
    assert "|".join(each for _, each in found) == was
