"""Numbers that somebody keeps as something else than tensors are found, and what is in tensors counts once."""

import pytest

from manyranks.measure.watch import Watch
from tests.unit.keepers import NO_COPIES, SIZE, STORE, WAYS, Keeper


@pytest.fixture
def more(tmp_path):
    """Counts the bytes that are added when something is done to a keeper."""
    yield lambda change: measured(str(tmp_path), change)
    STORE.clear()
    if "kept" in vars(Keeper):
        del Keeper.kept


def measured(folder, change):
    watch = Watch(folder, 0)
    with watch.watching():
        keeper = Keeper()
        watch.weigh(keeper)
        change(keeper)
        watch.weigh(keeper)
    return watch.held[1] - watch.held[0]


@pytest.mark.parametrize("way", WAYS)
def test_a_copy_in_another_form_counts(way, more):
    assert more(WAYS[way]) == pytest.approx(SIZE, rel=0.05)


@pytest.mark.parametrize("way", NO_COPIES)
def test_what_shares_a_tensors_memory_does_not_count_again(way, more):
    assert more(NO_COPIES[way]) < SIZE // 20
