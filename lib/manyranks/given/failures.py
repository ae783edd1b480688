"""Hands out what exercise 12_failures needs: cases, checkpoints, replicas, and the log of a run that broke. No answer."""

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from itertools import cycle
from random import Random
from typing import Any, NamedTuple

import torch
from torch import Tensor

from manyranks.given.disk import FOLDER
from manyranks.given.numbers import drawn, generator, normal, seed_of
from manyranks.measure.journal import Stopped, kind_of

PATH = f"{FOLDER}/rank-0.bin"

# Tasks 1 to 5


class Save(NamedTuple):
    """A case of saving. first: whether there is no checkpoint yet."""

    first: bool

    def __str__(self) -> str:
        return "where no checkpoint is there yet" if self.first else "where an old checkpoint is there"

    def made(self, rank: int, ranks: int, seed: int) -> tuple[dict[str, bytes], list[bytes], list[bytes], list[bytes], str]:
        """Returns the files that are there; parts of what's saved: by a rank, by another, and of a smaller save; its folder."""
        random = drawn(seed, "saves")
        count = random.choice((2, 4)) if seed else 3
        old, *parts = ([random.randbytes(random.randrange(k, k + 400)) for _ in range(count)] for k in (4800, 4800, 4800, 1000))
        folder = f"{FOLDER}-{random.randrange(1000)}" if seed else FOLDER  # where two save at once
        return {} if self.first else {PATH: b"".join(old)}, *parts, folder


class Job(NamedTuple):
    """The arguments of how_often. in_background: whether training goes on during the write."""

    seconds: float
    copy: float
    write: float
    restart: float
    gpu_mtbf: float
    gpus: int
    in_background: bool

    def __str__(self) -> str:
        how = "in the background" if self.in_background else "while training stands still"
        times = f"steps of {self.seconds:g} s, a copy of {self.copy:g} s and a write of {self.write:g} s"
        return f"for {self.gpus:,} GPUs, {times} {how}"


JOBS = (
    Job(3.0, 2.0, 28.0, 240.0, 5e8, 4096, False),
    Job(3.0, 2.0, 28.0, 240.0, 5e8, 4096, True),
    Job(0.75, 0.02, 200.4, 90.0, 3e8, 8192, True),
    Job(0.5, 0.4, 200.0, 90.0, 3e8, 8192, True),
    Job(60.0, 0.005, 0.005, 90.0, 1e8, 8192, False),
    Job(2.0, 1.0, 120.0, 60.0, 4e5, 8192, False),
)


def drawn_jobs(random: Random) -> list[Job]:
    """Returns one of each kind."""
    found = []
    for in_background in (False, True):
        seconds, copy, write = random.uniform(0.5, 9), random.uniform(0.5, 5), random.uniform(10, 60)
        gpus, mtbf, restart = random.randint(500, 9000), random.uniform(2e8, 9e8), random.uniform(100, 600)
        found.append(Job(seconds, copy, write, restart, mtbf, gpus, in_background))
    seconds = random.uniform(0.5, 2)
    return [*found, Job(seconds, 0.01, seconds * (random.randint(150, 300) + 0.2), 60.0, 1e8, random.randint(2000, 9000), True)]


class Resume(NamedTuple):
    """A run on `before` ranks, and on `after` ranks from step `step` on.

    used: whether the new loaders have been used
    twice: whether they save the state that they have loaded, and load that again
    """

    samples: int
    batch: int
    before: int
    after: int
    step: int
    ahead: int
    used: bool = False
    twice: bool = False

    def __str__(self) -> str:
        read = f"{self.ahead} batches read ahead" if self.ahead else "nothing read ahead"
        used = ", into loaders that have been used" if self.used else ""
        used += ", saved and loaded twice" if self.twice else ""
        where = f"step {self.step} of {self.samples} samples in batches of {self.batch}"
        return f"at {where}, {read}, from {self.before} to {self.after} ranks{used}"

    def made(self, rank: int, ranks: int, seed: int) -> tuple:
        """Returns what loaders are made with, how many, and what is done with them: before, on rank 0, and after."""
        own = self.samples, self.batch, seed_of(seed, self) % 2**31, self.ahead
        return (*own, self.before, self.step, False, False) if rank == 0 else (*own, self.after, 0, self.used, self.twice)


RESUMES = (
    Resume(500, 12, 2, 3, 20, 0),
    Resume(42, 12, 3, 2, 6, 2),
    Resume(30, 12, 4, 4, 3, 3, True, True),
    Resume(42, 12, 2, 4, 0, 2),
)


def drawn_resumes(random: Random) -> list[Resume]:
    """Returns some from other steps, of other sizes, with and without batches read ahead."""
    found = []
    for batch, ahead in zip(random.sample((12, 24, 36), 2), (0, random.randint(1, 4)), strict=True):
        ranks = random.sample((2, 3, 4, 6), 2)
        found.append(Resume(random.randint(40, 500), batch, *ranks, random.randint(5, 40), ahead))
    return found


def weight(state: Any, depth: int = 0) -> int:
    """Returns the bytes of a state. Raises Stopped for what has no place in a checkpoint."""
    if isinstance(state, Tensor):
        return state.numel() * state.element_size()
    if isinstance(state, dict | list | tuple) and depth < 8:
        parts = [*state, *state.values()] if isinstance(state, dict) else state
        return sum(weight(part, depth + 1) for part in parts)
    if state is None or isinstance(state, bool | int | float | str):
        return len(state) if isinstance(state, str) else 8
    hint = "a checkpoint holds numbers, strings, lists, dicts and tensors; generator.get_state() is a tensor"
    raise Stopped(f"state() has {kind_of(state)} in it", hint)


class File(NamedTuple):
    """A file, as its checkpoint's manifest has it."""

    bytes: int
    crc32: int


HARM = ("missing", "cut", "longer", "flipped")


class Checkpoints(NamedTuple):
    """A folder of checkpoints.

    harms: from the newest on, what is wrong with each, "" for nothing; in the newest it's the last file
    files: of each checkpoint
    size: bytes of a file
    """

    harms: tuple[str, ...]
    files: int
    size: int = 4000

    def __str__(self) -> str:
        said = {"": "whole", "missing": "a file missing", "cut": "a file cut short", "longer": "a file too long"}
        harms = ", ".join(said.get(harm, "a flipped bit") for harm in self.harms)
        return f"{self.files} files each, of {self.size:,} bytes, newest to oldest: {harms}"

    def made(self, seed: int) -> tuple[dict[str, dict[str, File]], dict[str, bytes]]:
        """Returns the manifests, and what lies on the disk."""
        random = drawn(seed, "night")
        manifests, disk = {}, {}
        power, gap, over = 10 ** random.randint(3, 5), random.randrange(10, 300, 10), random.randint(1, 2)
        for i, harm in enumerate(reversed(self.harms)):
            name, hit = f"step-{power + (i - over) * gap}", random.randrange(self.files)
            hit = self.files - 1 if i == len(self.harms) - 1 else hit
            if random.random() < 0.5:  # a save that was broken off: it says nothing of the other files
                disk[f"{FOLDER}/{name}-rank-{random.randrange(self.files)}.bin.tmp"] = random.randbytes(random.randrange(4000))
            for k in range(self.files):
                path, data = f"{FOLDER}/{name}-rank-{k}.bin", random.randbytes(self.size)
                manifests.setdefault(name, {})[path] = File(len(data), zlib.crc32(data))
                if k == hit and harm:
                    at = random.randrange(len(data))
                    cut, flipped = data[:at], data[:at] + bytes([data[at] ^ 1 << random.randrange(8)]) + data[at + 1 :]
                    data = {"cut": cut, "longer": data + b"\0" * 16, "flipped": flipped}.get(harm)
                if data is not None:
                    disk[path] = data
        names = random.sample(sorted(manifests), len(manifests))
        return {name: manifests[name] for name in names}, disk


CHECKPOINTS = (
    Checkpoints(("cut", "missing", "flipped", "longer", "", ""), 7),
    Checkpoints(("", "", "cut", "", "", ""), 7),
    Checkpoints(("flipped", "missing", "longer", "cut", "flipped", "missing"), 7),
)


def drawn_checkpoints(random: Random) -> Callable[[int], list[Checkpoints]]:
    """Lists those of n ranks: as many checkpoints as in the notebook's cases, with other answers, and one of large files."""
    cases = zip(random.sample(range(6), 3), random.sample((3, 7, 9), 3), strict=True)  # 3: fewer than ranks
    found = [Checkpoints((*random.choices(HARM, k=k), "", *random.choices(("", *HARM), k=5 - k)), files) for k, files in cases]
    large = 2**20 + random.randint(1, 2**16)  # bytes: more than is read at once
    return lambda n: [*found, Checkpoints(("",), n, large)]


class Odd(NamedTuple):
    """A case of odd replicas. wrong: what one has that the others don't; "" where all agree; alike: odd ones agree."""

    wrong: str
    replicas: int = 1
    alike: bool = False
    room = 128  # bytes that a rank may send on top of what ours sends, such as a digest in words; the same in all cases

    def __str__(self) -> str:
        who = "one replica" if self.replicas == 1 else f"each of {self.replicas} replicas"
        who += ", which agree," if self.alike else ""
        return f"{who} has {self.wrong}" if self.wrong else "with a NaN that all replicas have"

    def made(self, rank: int, ranks: int, seed: int) -> list[Tensor]:
        draw, places = generator(seed, "replicas"), drawn(seed, self, ranks)
        big = torch.randn(40, 30, generator=draw)
        halves, whole = torch.randn(501, generator=draw).bfloat16(), torch.arange(7) + 2**60 + drawn(seed).randrange(1000)
        nan = places.randrange(501)
        halves[nan] = torch.nan
        parts = [big.T, halves, whole, torch.zeros(5), *torch.randn(2, 6, generator=draw)]
        odd = places.sample(range(ranks), min(self.replicas, ranks))
        first, i = places.randrange(40), places.randrange(29)
        if rank in odd and self.wrong:
            row = big[(first + (0 if self.alike else odd.index(rank))) % 40]
            _WRONG[self.wrong](parts, row, i, nan)
        return parts


_ONE_BIT = "another lowest bit in one element"
_WRONG = {  # how a replica goes wrong: its parameters, a row of the first of them, an element, where there's a NaN
    _ONE_BIT: lambda parts, row, i, nan: row.view(torch.int32)[i].bitwise_xor_(1),
    "another lowest bit in an int64": lambda parts, row, i, nan: parts[2][i % 7].bitwise_xor_(1),
    "two elements swapped": lambda parts, row, i, nan: row[i : i + 2].copy_(row[i : i + 2].flip(0)),
    "two tensors swapped": lambda parts, row, i, nan: parts.append(parts.pop(4)),
    "another sign of a zero": lambda parts, row, i, nan: parts[3][i % 5].neg_(),
    "a NaN": lambda parts, row, i, nan: parts[1][nan - 1 - i].fill_(torch.nan),
    "a NaN with other bits": lambda parts, row, i, nan: parts[1].view(torch.int16)[nan].bitwise_xor_(1),
}
ODDS = (Odd(""), *map(Odd, _WRONG), *(Odd(_ONE_BIT, several) for several in (2, 3)), Odd(_ONE_BIT, 2, alike=True))


def unsalted(real: Callable, value: Any) -> int:
    """Stands in for hash(), and refuses what each process of a cluster would hash differently. real: hash itself."""
    if isinstance(value, str | bytes | memoryview):
        raise Stopped("hash() of bytes is another number in each process of a cluster", "zlib.crc32 is the same everywhere")
    return real(value)


# Task 6


@dataclass
class Replica:
    """A model with Adam, flat and in float64.

    weights_P: P of them
    first_P, second_P: Adam's moments
    steps: that Adam has done
    """

    weights_P: Tensor
    first_P: Tensor
    second_P: Tensor
    steps: int

    def update(self, gradient_P: Tensor) -> None:
        """Takes a step of Adam."""
        self.steps += 1
        self.first_P.lerp_(gradient_P, 0.1)
        self.second_P.lerp_(gradient_P**2, 0.05)
        first, second = self.first_P / (1 - 0.9**self.steps), self.second_P / (1 - 0.95**self.steps)
        self.weights_P -= 0.01 * first / (second.sqrt() + 1e-8)


class Roles(NamedTuple):
    """A case of quorum_step.

    roles: of the ranks, in order
    least: the fewest healthy ranks that may take a step
    bad: a worthless gradient's number
    room: bytes that a rank may send on top of what ours sends: with a quorum, the gradient once more
    turned: whether the rank that has the first role is drawn
    """

    roles: tuple[str, ...]
    least: int
    bad: float = float("nan")
    room: int = 4000
    turned: bool = False

    def __str__(self) -> str:
        turned = ", from some rank on" if self.turned else ""
        return f"which are {', '.join(self.roles)}{turned}, with a quorum of {self.least}"

    def made(self, rank: int, ranks: int, seed: int) -> tuple[Replica, Tensor, str, int]:
        size = (drawn(seed, "P").randint(260, 299) if seed else 300,)
        first, second, weights = (normal(size, seed, self, kind) for kind in range(3))
        role = self.roles[(rank + self.turned * drawn(seed, self).randrange(ranks)) % ranks]
        replica = Replica(weights, first, second**2, drawn(seed).randint(5, 40))
        if role == "back":
            replica = Replica(*(torch.full_like(weights, float("nan")) for _ in range(3)), 0)
        gradient = normal(size, seed, rank) if role == "healthy" else torch.full_like(weights, self.bad)
        return replica, gradient, role, self.least


def quorums(n: int) -> list[Roles]:
    def roles(*first: str) -> tuple[str, ...]:
        return (*first, *[first[-1]] * n)[:n]

    return [
        Roles(roles("healthy", "sick", "healthy"), 1),
        Roles(roles("sick", "healthy"), 1, bad=1e6),
        Roles(roles("back", "healthy"), 1),
        Roles(("healthy", *["sick"] * (n - 2), "back"), 1),
        Roles(roles("back", "healthy", "sick"), max(2, n - 1), room=64),
        Roles(roles("back", "sick"), 1, room=64),
        Roles(roles("healthy"), n),
        *([Roles(("back", "healthy", *["back"] * (n - 2)), 1)] if n > 2 else []),
        Roles(roles("back", "healthy"), 1, turned=True),
        Roles(roles("sick", "healthy"), n, room=64, turned=True),
    ]


# Task 7


class Entry(NamedTuple):
    """A line of a log.

    seconds: since the start of the run
    rank: that wrote it
    kind: "step", "saved", "enters" or "error"
    step: of the run
    value: of "step", seconds that this rank computed; of "saved", bytes of its file; else words
    """

    seconds: float
    rank: int
    kind: str
    step: int
    value: float | str


class Sick(NamedTuple):
    """A log of a run, by its seed."""

    seed: int

    def __str__(self) -> str:
        return "of the log that you have" if self.seed == 1 else "of another log"


def log(seed: int) -> list[Entry]:
    """Returns the log of a run that broke."""
    random, other, found = Random(seed), Random(seed + 1), []
    ranks, every, last = random.randint(6, 12), random.randint(6, 9), random.randint(3, 5)
    dead, slow, hiccup, late, last_hit = random.sample(range(ranks), 5)
    compute, stall, size = random.randint(20, 40) / 8, random.randint(3, 9) / 4, random.randint(10**8, 10**9)
    seconds, steps, newest = compute * 1.5, every * last + random.randint(2, every - 1), every * last
    torn = {newest: late, newest - every: slow}  # the newest lacks a file, and the one before has one that was cut
    if seed != 1:  # how many, and whose, is drawn
        torn = dict(zip(torn, random.sample(range(ranks), random.randint(0, 2)), strict=False))
    hits = {1: late, every + 2 if seed == 1 else other.randint(2, 3): hiccup, steps: last_hit}
    calm = cycle(rank for rank in range(ranks) if rank not in (slow, *hits.values()))  # no one step tells who is slow
    busy = dict(zip(other.sample(range(1, steps + 1), steps // 2), calm, strict=False)) if seed > 9 else {}
    now = random.randint(50, 90) / 4  # the start takes this long
    for step in range(1, steps + 1):
        hit = hits.get(step)
        long = 0 if hit is None else 4 * compute
        usual = seconds * (1 if seed == 1 else other.uniform(0.97, 1.03))
        now += usual + long + (stall if step % every == 1 and step > 1 else 0)
        for rank in random.sample(range(ranks), ranks):
            own = 1.3 if rank == slow else 1.45 if rank == busy.get(step) else random.randint(95, 105) / 100
            own = compute * own + (long if rank == hit else 0)
            found.append(Entry(now, rank, "step", step, round(own, 3)))
        for rank in range(ranks) if step % every == 0 else ():
            if torn.get(step) != rank or step < newest:
                written = size * (random.randint(3, 9) if torn.get(step) == rank else 10) // 10
                found.append(Entry(now + stall + random.randint(8, 30) / 8, rank, "saved", step, written))
    calls = [f"all_gather layer {k}" for k in range(9)] + ["all_reduce gradients"]
    stop = random.randint(2, 8)
    for rank in range(ranks):
        for k in range(stop + (rank != dead)):
            found.append(Entry(now + k / 4 + rank / 1024, rank, "enters", steps + 1, calls[k]))
    for i, rank in enumerate(random.sample([one for one in range(ranks) if one != dead], ranks - 1)):
        found.append(Entry(now + 600 + i / 8, rank, "error", steps + 1, f"timeout after 600 s in {calls[stop]}"))
    return sorted(found, key=lambda entry: entry.seconds)
