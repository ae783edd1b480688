"""training.corpus: the same text and the same batches whatever the number of ranks."""

import os
import sysconfig
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from manyranks.training import corpus

LIBRARY = Path(sysconfig.get_path("stdlib"))


def library(folder: Path, **files: bytes) -> Path:
    """A folder with enough Python source, and these files."""
    for name, source in {**{f"m{i:02}": b"%02d" % i * 30_000 for i in range(40)}, **files}.items():
        (folder / f"{name}.py").write_bytes(source)
    return folder


def test_the_text_is_the_standard_library_s_source_and_not_what_is_beside_it():
    train, held_out = corpus.text()
    everything = bytes(train.numpy()) + bytes(held_out.numpy())
    assert (LIBRARY / "heapq.py").read_bytes() in everything
    assert Path(torch.__file__).read_bytes() not in everything
    assert train.dtype == held_out.dtype == torch.uint8
    assert 0.02 < len(held_out) / len(train) < 0.1


def test_files_stand_in_the_order_of_their_paths_and_every_20th_is_held_out(tmp_path):
    folder = library(tmp_path)
    (folder / "test").mkdir()
    (folder / "test" / "a.py").write_bytes(b"never")
    (folder / "notes.txt").write_bytes(b"never")
    train, held_out = corpus.text(str(folder))
    assert bytes(held_out.numpy()) == b"19" * 30_000 + b"39" * 30_000
    assert bytes(train.numpy()) == b"".join(b"%02d" % i * 30_000 for i in range(39) if i != 19)


def test_a_python_without_its_source_is_an_error_in_words(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"has 0 bytes of Python source.*python\.org"):
        corpus.text(str(tmp_path))


def test_the_text_is_read_once_and_nothing_is_written(monkeypatch):
    first = corpus.text()
    monkeypatch.setattr(os, "walk", None)
    assert corpus.text() is first


@given(step=st.integers(0, 10_000), size=st.integers(1, 40), ranks=st.integers(1, 9))
def test_the_ranks_parts_of_a_batch_are_the_batch(step, size, ranks):
    parts = [corpus.batch(step, size, 16, rank, ranks) for rank in range(ranks)]
    assert torch.equal(torch.cat(parts), corpus.batch(step, size, 16))
    sizes = [len(part) for part in parts]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] - sizes[-1] <= 1


def test_a_batch_is_a_piece_of_the_text_of_its_step_and_no_other():
    train = bytes(corpus.text().train.numpy())
    rows = corpus.batch(7, 5, 32)
    assert rows.shape == (5, 33)
    assert rows.dtype == torch.int64
    assert all(bytes(row.tolist()) in train for row in rows)
    assert torch.equal(rows, corpus.batch(7, 5, 32))
    assert not torch.equal(rows, corpus.batch(8, 5, 32))


def test_a_batch_leaves_the_generator_of_everyone_else_alone():
    torch.manual_seed(0)
    wanted = torch.rand(3)
    torch.manual_seed(0)
    corpus.batch(1, 2, 8)
    assert torch.equal(torch.rand(3), wanted)


@given(size=st.integers(1, 40), ranks=st.integers(1, 9))
def test_the_ranks_parts_of_the_held_out_sequences_are_these(size, ranks):
    parts = [corpus.held_out(size, 16, rank, ranks) for rank in range(ranks)]
    assert torch.equal(torch.cat(parts), corpus.held_out(size, 16))


def test_held_out_sequences_come_from_the_held_out_text_all_over():
    rest = bytes(corpus.text().held_out.numpy())
    places = [rest.index(bytes(row.tolist())) for row in corpus.held_out(10, 200)]
    assert all(abs(place - i * len(rest) / 10) < 300 for i, place in enumerate(places))
