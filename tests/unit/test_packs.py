"""What docs/packs.py draws beforehand for the explorers on the site. tests/browser/explorers.py plays the packs."""

import json
import re
import sys
from importlib import import_module

import pytest

from tests.conftest import ROOT


@pytest.fixture(scope="module")
def packs():
    sys.path.insert(0, str(ROOT / "docs"))
    yield import_module("packs")
    sys.path.remove(str(ROOT / "docs"))


@pytest.fixture(scope="module")
def states(packs):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("manyranks.show.labels.Labels.draw", import_module("manyranks.show.labels").Labels.draw)  # it's put back
        yield packs.States("hardware")


@pytest.mark.parametrize(("most", "radius"), [(1000, 2), (300, 2), (100, 1), (1, 1)])
def test_a_page_has_no_more_states_than_wanted_and_all_that_buttons_set(states, most, radius):
    offered, apart = states.offered(most)
    assert apart == radius
    assert len(list(states.chosen(offered, apart))) <= max(most, 60)  # three controls with two values, and presets'
    assert [each for start in states.starts for each in start.items() if each[1] not in offered[each[0]]] == []


def test_a_state_is_the_same_after_another_one(states):
    far, first = states.starts[1] | {"n": 1024}, states.starts[0]
    drawn = [states.state(values) for values in (first, far)]
    states.seen.clear()
    assert [states.state(values) for values in (far, first)] == drawn[::-1]
    assert drawn[0] != drawn[1]


def test_a_pack_of_changed_sources_is_none(packs, monkeypatch, tmp_path):
    monkeypatch.setattr(packs, "PACKS", tmp_path)
    assert packs.made("zero") is None
    for digest, fresh in ((packs.digest(ROOT / "Makefile"), True), ("0", False)):
        (tmp_path / "zero.json").write_text(json.dumps({"files": {"Makefile": digest}}))
        assert bool(packs.made("zero")) == fresh


PATHS = [
    ("M 1.5 2 L 3.5 2 L 3.5 4 L 1.5 4 z M 2 2 L 3 2 L 3 5 L 2 5 z", "m1.5 2h2v2h-2zm0.5 0h1v3h-1z"),
    ("M 1 2 L 3 4", "M 1 2 L 3 4"),
    ("M 0 0 L 1 0 L 1 1 L 0 1 z M 1 2 L 3 4", "M 0 0 L 1 0 L 1 1 L 0 1 z M 1 2 L 3 4"),
    ("", ""),
]


@pytest.mark.parametrize(("path", "short"), PATHS)
def test_a_path_of_boxes_is_written_from_one_to_the_next(packs, path, short):
    assert re.sub("^.*$", packs.relative, path) == short
