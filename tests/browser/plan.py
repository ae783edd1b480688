"""The page "Plan your run" of a site that docs/build.py made, in Chromium, beside the library in CPython: `make site-test`.

Pyodide computes the page's numbers. They have to be the library's: what is shown to the last digit, and the rest to 14 digits.
"""

import gzip
import json
import os
from collections.abc import Callable

import pytest

from manyranks.theory import ModelShape, Plan, clusters, from_hf_config, models, planner, written
from manyranks.theory.published import confidence, peak_confidence
from tests.browser.pages import opened, seen
from tests.conftest import ROOT

SITE, FILES = ROOT / "site", "_static/planner"
SECONDS = 300  # for Python to start and plan, on a busy machine
TASK = {"gpus": 64, "seq": 8192, "batch": 512}  # the form's
CONFIG = {"model_type": "llama", "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "vocab_size": 128256}
CONFIG |= {"num_attention_heads": 32, "num_key_value_heads": 8, "tie_word_embeddings": True}
TABLE = """table => [...table.tBodies[0].rows].map(row => [...row.cells].map(
    cell => cell.firstChild?.value ? [cell.firstChild.value, cell.textContent] : cell.textContent))"""


@pytest.fixture(scope="module")
def page():
    if not (SITE / FILES).exists():
        why = f"the site in {SITE} has no planner: run `make pyodide site`"
        pytest.fail(why) if os.environ.get("CI") else pytest.skip(why)
    with opened(SITE) as (page, address, said):
        page.address = address
        yield page
        assert said == []


def planned(page) -> list[list]:
    """Presses "Plan", waits, and returns the table's cells; for a number in full, it and what is shown."""
    page.get_by_role("button", name="Plan", exact=True).click()
    page.locator("[role=status]", has_text="lanned").wait_for(timeout=1000 * SECONDS)
    return page.locator("#plans table").evaluate(TABLE)


def status(page) -> str:
    return page.locator("[role=status]").inner_text()


def by_library(shape: ModelShape, cluster: str, **task) -> list:
    """The fastest plan of each TP, PP and EP, eight of them, and the fastest like which runs were published."""
    found, shown = planner.search(shape, clusters[cluster], **task), {}
    for one in found:
        if len(shown) < 8:
            shown.setdefault((one.plan.tp, one.plan.pp, one.plan.ep), one)
    plans = list(shown.values())
    if found.checked and found.checked.plan not in [one.plan for one in plans]:
        plans.append(found.checked)
    return sorted(plans, key=lambda one: one.seconds)


def compare(page, cells: list[list], shape: ModelShape, found: list) -> None:
    """Compares every cell, every plan and every command."""
    assert len(cells) == len(found)
    details = page.locator("#plans details")
    for k, (row, one) in enumerate(zip(cells, found, strict=True)):
        sure = str(confidence(one.time))
        number, plan, (seconds, step), error, mfu, (held, memory), memory_error, why = row
        assert float(seconds) == pytest.approx(one.seconds, rel=1e-14)  # Python sums more exactly from 3.12 on
        assert int(held) == one.peak.total
        assert (step, memory) == (f"{one.seconds:.4g} s", f"{one.peak.total / 1e9:.3g} GB")
        assert (number, error, mfu) == (f"{k + 1}", sure, f"{one.time.mfu:.1%}")
        assert memory_error == "; ".join(filter(None, (str(peak_confidence(shape, one.plan)), one.tight)))
        assert why == one.why.removesuffix(f"; {sure}")
        assert plan == f"{written.degrees(one.plan)}; {written.kept(one.plan)}"
        megatron, titan, python = details.nth(k).locator("pre").all_text_contents()
        assert python == f"theory.{one.plan!r}"
        assert (megatron, titan) == (
            command("Megatron-Core", written.megatron_core, shape, one.plan),
            command("torchtitan", written.torchtitan, shape, one.plan),
        )


def command(framework: str, write: Callable, shape: ModelShape, plan: Plan) -> str:
    try:
        return write(shape, plan)
    except ValueError as error:
        return f"# {framework} doesn't run this plan: {error}"


def test_70b_on_64_h100s_is_planned_as_the_library_does(page):
    page.goto(f"{page.address}plan.html")
    assert status(page) == "4,194,304 tokens per step"
    cells, shape = planned(page), models["llama3-70b"]
    found = by_library(shape, "h100-dgx", **TASK)
    compare(page, cells, shape, found)
    assert len({row[3].startswith("not checked: ") for row in cells}) == 2  # some are, some aren't
    assert list(seen(page)) == []


def test_a_pasted_config_and_the_link_to_its_result(page):
    page.goto(f"{page.address}plan.html#gpus=16&seq=4096&batch=64&stack=torchtitan-2025&cluster=a100-dgx")
    page.get_by_label("Your own model").fill(json.dumps(CONFIG, indent=2))
    assert page.locator("[name=model]").is_disabled()
    cells, shape = planned(page), from_hf_config(CONFIG)
    found = by_library(shape, "a100-dgx", gpus=16, seq=4096, batch=64, stack="torchtitan-2025", zero=(2, 3))
    compare(page, cells, shape, found)
    link = page.get_by_role("link", name="A link to this result").get_attribute("href")
    page.goto("about:blank")
    page.goto(link)
    assert page.get_by_label("GPUs").input_value() == "16"
    assert planned(page) == cells


WRONG = {
    "not JSON": "{",
    "a key missing": json.dumps({name: value for name, value in CONFIG.items() if name != "vocab_size"}),
    "an unknown family": json.dumps({"model_type": "lama"}),
    "an unknown key": json.dumps(CONFIG | {"hidden_sizes": 4}),
}


@pytest.mark.parametrize("config", WRONG.values(), ids=WRONG)
def test_a_config_that_is_not_understood_gets_the_library_s_sentence(page, config, tmp_path, monkeypatch):
    if not page.url.startswith(page.address):
        page.goto(f"{page.address}plan.html")
    page.get_by_label("Your own model").fill(config)
    page.get_by_role("button", name="Plan", exact=True).click()
    page.locator("[role=status]", has_text="Not planned").wait_for(timeout=1000 * SECONDS)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "your model").mkdir()
    (tmp_path / "your model" / "config.json").write_text(config)
    with pytest.raises(ValueError) as raised:
        from_hf_config("your model/config.json")
    assert status(page) == f"Not planned: {raised.value}"
    assert page.locator("#plans").inner_text() == ""


def test_what_cannot_be_planned_is_said_and_a_long_search_can_be_stopped(page):
    page.goto(f"{page.address}plan.html#gpus=1&config=")
    page.get_by_role("button", name="Plan", exact=True).click()
    page.locator("[role=status]", has_text="no plan for llama3-70b fits in 80 GB").wait_for(timeout=1000 * SECONDS)
    page.goto(f"{page.address}plan.html#model=deepseek-v3&gpus=2048&seq=4096&batch=15360")
    page.get_by_label("Sequences per step").press("Enter")  # by the keyboard alone
    stop = page.get_by_role("button", name="Stop", exact=True)
    stop.focus()
    page.keyboard.press("Space")
    assert status(page) == "Stopped."
    assert page.get_by_role("button", name="Plan", exact=True).is_enabled()


def test_the_page_says_how_much_it_loads(page):
    sizes = [file.read_bytes() for file in (SITE / FILES).iterdir()]
    compressed, whole = sum(len(gzip.compress(each, 6)) for each in sizes) / 1e6, sum(map(len, sizes)) / 1e6
    assert f"{compressed:.1f} MB compressed, or {whole:.0f} MB" in page.content()
