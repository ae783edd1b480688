"""Text to train on, without a download: the source of Python's own standard library.

A token is a byte, so the vocabulary has 256. The text depends on the version of Python; which
part of it a step takes depends on the step and the size of the global batch only, so that any
number of ranks trains on the same sequences.
"""

import functools
import os
import sysconfig
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

VOCAB = 256
# Not the library: what is installed beside it, its tests, IDLE; hardly text: tables of characters.
_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idlelib", "encodings"}
_HELD_OUT = 20  # one file in so many
_FEWEST_BYTES = 1_000_000  # a whole library has ten times as many


class Text(NamedTuple):
    """Files end to end, uint8: those to train on, and those held out."""

    train: Tensor
    held_out: Tensor


@functools.cache
def text(folder: str | None = None) -> Text:
    """The corpus, read once a process.

    folder: another one than the standard library's

    Files in the order of their paths, every 20th held out.
    Raises FileNotFoundError where Python's source is not on the machine.
    """
    root = Path(folder or sysconfig.get_path("stdlib"))
    files = [path.read_bytes() for path in _files(root)]
    if (found := sum(map(len, files))) < _FEWEST_BYTES:
        raise FileNotFoundError(
            f"{root} has {found:,} bytes of Python source, and the corpus needs {_FEWEST_BYTES:,}: "
            "it is the source of the standard library, which this Python came without. Use one "
            "from python.org, conda or a Linux distribution's full package"
        )
    held_out = files[_HELD_OUT - 1 :: _HELD_OUT]
    del files[_HELD_OUT - 1 :: _HELD_OUT]
    return Text(
        *(torch.frombuffer(bytearray().join(part), dtype=torch.uint8) for part in (files, held_out))
    )


def batch(step: int, size: int, seq: int, rank: int = 0, ranks: int = 1) -> Tensor:
    """This rank's sequences of a step's global batch, tokens_BT int64 with T = seq + 1.

    The first seq tokens of each are the inputs, the last seq the targets.

    size: sequences of the global batch, at places drawn by a generator that is seeded with the step
    """
    generator = torch.Generator("cpu").manual_seed(step)
    train = text().train
    starts_B = torch.randint(len(train) - seq, (size,), generator=generator, device="cpu")
    return _cut(train, starts_B[share(size, rank, ranks)], seq)


def pairs(step: int, size: int, seq: int) -> tuple[Tensor, Tensor]:
    """Returns batch() for this rank of the default group: inputs, and the bytes that follow."""
    tokens_BT = batch(step, size, seq, dist.get_rank(), dist.get_world_size())
    return tokens_BT[:, :-1], tokens_BT[:, 1:]


def held_out(size: int, seq: int, rank: int = 0, ranks: int = 1) -> Tensor:
    """Returns this rank's of `size` sequences spread evenly over the held-out text, as batch."""
    rest = text().held_out
    starts_B = torch.arange(size, device="cpu") * (len(rest) - seq) // size
    return _cut(rest, starts_B[share(size, rank, ranks)], seq)


def share(size: int, rank: int, ranks: int) -> slice:
    """Returns which of `size` sequences are this rank's: the first size % ranks take one more."""
    least, more = divmod(size, ranks)
    first = rank * least + min(rank, more)
    return slice(first, first + least + (rank < more))


def _files(root: Path) -> list[Path]:
    found = []
    for folder, inside, names in os.walk(root):
        inside[:] = set(inside) - _LEFT_OUT  # os.walk goes into what is left
        found += [Path(folder, name) for name in names if name.endswith(".py")]
    return sorted(found)  # path by path, part by part: the same order on every system


def _cut(source: Tensor, starts_B: Tensor, seq: int) -> Tensor:
    return source.unfold(0, seq + 1, 1)[starts_B].long()
