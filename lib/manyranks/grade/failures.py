"""Checks of exercise 12_failures: saves that survive a crash, how often to save, exact resumes, and ranks that went wrong.

Files are on a disk in memory, which knows what a power cut leaves of them at each moment.
"""

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from random import Random
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from numpy import bool_

from manyranks.given import disk as disks
from manyranks.given import failures as given
from manyranks.given.disk import FOLDER, Disk, in_words
from manyranks.given.failures import Checkpoints, Job, Odd, Resume, Roles, Save, Sick
from manyranks.grade.check import Task
from manyranks.grade.judges import Judge, Right, Verdict, at_most, by, facts, values
from manyranks.grade.learner import Ready, error_of, items, number, plain, tensor, whole
from manyranks.grade.trial import Seen, Trial
from manyranks.measure.journal import Stopped, kind_of
from manyranks.measure.prints import size
from manyranks.measure.watch import Watch

_task = partial(Task, "12_failures", ready=Ready((given.__name__, disks.__name__)))
_alone = partial(_task, worlds=(1,))
_at_most = partial(at_most, unit=lambda count: size(int(count)))

# Task 1: a save that survives a crash


def _parts(random: Random, size: int = 4800) -> list[bytes]:
    return [random.randbytes(random.randrange(size, size + 400)) for _ in range(3)]


def _saved(case: Save, function: Callable, watch: Watch) -> dict:
    random = Random(watch.seed + 1)
    old, new, newer, others = (_parts(random, size) for size in (4800, 4800, 1000, 4800))
    path, other = f"{FOLDER}/rank-0.bin", f"{FOLDER}/rank-1.bin"
    before = {} if case.first else {path: b"".join(old)}
    names = {b"".join(new): "the new one", before.get(path): "no file yet" if case.first else "the old one"}
    left, half, later = [], {}, {b"".join(newer): "the new one"}

    def look(step: str) -> None:
        left.extend(f"{one}, after {step}" for one in disk.after_a_cut(path, names) if one not in names.values())
        if step == "a write" and not half:
            half.update(disk.files)

    with Disk(before, look=look).mounted() as disk:
        function(path, [*new])
    kept = disk.files.get(path)
    return {
        "what the file holds": in_words(kept, names),
        "the crc32 of what it holds": crc32(kept or b""),
        "what a power cut during the save leaves": left[0] if left else "the old one or the new one",
        "what a power cut leaves after the save": " or ".join(sorted(disk.after_a_cut(path, names))),
        "the number of other files that the save leaves": len(disk.files.keys() - {path}),
        "what two ranks leave that save at once": _at_once(function, {path: new, other: others}),
        "what the next save leaves, after one that was killed": _saves(Disk(half), function, path, newer, later),
        "what a full disk leaves": _saves(Disk(before, room=7000), function, path, new, names),
    }


def _at_once(function: Callable, files: dict[str, list[bytes]]) -> str:
    """A save of the second file comes between two steps of a save of the first."""
    (path, parts), second = files.items()
    ended = []

    def look(step: str) -> None:
        if step == "a write" and not ended:
            ended.append("")
            ended[0] = error_of(function, second[0], [*second[1]])

    with Disk({}, look=look).mounted() as disk:
        error = error_of(function, path, [*parts]) or "".join(ended)
    return error or ("both whole" if all(disk.files.get(p) == b"".join(its) for p, its in files.items()) else "a wrong file")


def _saves(disk: Disk, function: Callable, path: str, parts: list[bytes], names: dict[bytes | None, str]) -> str:
    with disk.mounted():
        error = error_of(function, path, [*parts])
    return f"{in_words(disk.files.get(path), names)}, and {error or 'no error'}"


def _then(*args: Any, **kwargs: Any) -> Judge:
    """Facts that count only where the values are right."""
    return facts(*args, **kwargs)._replace(needs=1)


_ORDER = "all bytes, under another name in the same folder; flush; fsync; only then os.replace"
atomic_save = _alone(
    "atomic_save",
    5,
    _saved,
    (
        values(0.5, "a power cut at any moment leaves a whole checkpoint", "holds|during", alone=True, hint=_ORDER),
        _then(0.2, "when it has returned, the new one stays", "after the save", "the folder is a list of names: fsync it, too"),
        _then(0.15, "ranks that save at once don't meet", "at once", "put the file's own name into the temporary one"),
        _then(0.15, "copes with leftovers and a full disk", "other files|next save|full disk"),
    ),
    cases=(Save(False), Save(True)),
    call="atomic_save(path, parts)",
    advice=(
        ("Invalid cross-device link", "a rename works within one file system: put the temporary file next to the real one"),
        ("Parent directory /checkpoints", "give torch.save a file that you have opened, not a path: you have to fsync it"),
        ("Bad file descriptor|closed file", "write os.fsync(file.fileno()) while the file is open, with `import os` above"),
        ("No such file or directory: '/checkpoints", "the file isn't there: look at the order of writes, renames and removals"),
    ),
)

# Task 2: how often


def _pair(value: Any, call: str, form: str) -> tuple[Any, Any]:
    if not isinstance(value, tuple | list) or len(value) != 2:
        raise Stopped(f"{call} returned {kind_of(value)}", form)
    return value[0], value[1]


def _count(value: Any, what: str, form: str) -> int:
    """A whole number; 18.0 is one, too."""
    found = number(value, what, form)
    return int(found) if found.is_integer() else whole(found, what, form)


def _often(case: Job, function: Callable, watch: Watch) -> dict:
    form = "it returns a pair: a number of steps, and the goodput"
    steps, goodput = _pair(function(*case), "how_often", form)
    return {"the number of steps": _count(steps, "the number of steps", form), "the goodput": number(goodput, "goodput", form)}


how_often = _alone(
    "how_often",
    3,
    _often,
    (
        values(0.5, "the number of steps between saves", "steps", alone=True, part=True),
        values(0.5, "the goodput with that many steps", "goodput", alone=True, part=True),
    ),
    cases=given.JOBS,
    more=given.drawn_jobs,
    call="how_often(seconds, copy, write, restart, gpu_mtbf, gpus, beside)",
)

# Task 3: an exact resume


def _steps(loaders: list, steps: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The samples and the noise of so many steps, of all ranks in order."""
    form = "next(loader) returns a pair: a list of samples, and a tensor of noise"
    samples, noise = [], []
    for _ in range(steps):
        for loader in loaders:
            mine, its = _pair(next(loader), "next(loader)", form)
            samples += [whole(one, "a sample", form) for one in items(mine, "the samples", form, 1000)]
            noise.append(tensor(its, "the noise", form).flatten())
    return torch.tensor(samples), torch.cat([torch.empty(0), *noise])


def _resumed(case: Resume, kind: Any, watch: Watch) -> dict:
    def made(ranks: int) -> list:
        return [kind(case.samples, case.batch, watch.seed % 2**31 + 1, rank, ranks, case.ahead) for rank in range(ranks)]

    old, new = made(case.before), made(case.after)
    _steps(old, case.step)
    fetched = whole(old[-1].fetched, "loader.fetched", "leave the counter to fetch()")
    state = old[-1].state()
    if not isinstance(state, dict):
        raise Stopped(f"state() returned {kind_of(state)}", "it returns a dict")
    on, its = _steps(old, 5)  # the training goes on while the state is written
    count = given.weight(state)
    if case.used:
        _steps(new, 3)
    for again in range(1 + case.twice):
        state = new[-1].state() if again else state
        for loader in new:
            loader.load_state(deepcopy(state))
    samples, noise = _steps(new, 5)
    found = {"the samples of the loader that keeps training": on, "the samples after the resume": samples}
    found |= {"the noise of the loader that keeps training": its}
    return found | {"the noise after the resume": noise, "the number of batches it has fetched": fetched, "the state": count}


loader = _alone(
    "Loader",
    5,
    _resumed,
    (
        values(0.45, "the samples go on as if nothing had happened", "samples", alone=True),
        facts(0.35, "and so does the noise", "noise", "it's drawn when a batch is fetched, and that's before it's used"),
        facts(0.1, "reads ahead", "fetched", "__next__ fills the queue until `ahead` batches are left in it")._replace(needs=1),
        _at_most(0.1, "the state is small", "the state", "a step and a generator's state are enough", 2000)._replace(needs=1),
    ),
    cases=given.RESUMES,
    call="Loader(samples, batch, seed, rank, ranks, ahead)",
    a_class=True,
    methods=(
        ("Loader", "derive it from Batches"),
        ("state", "the check calls loader.state()"),
        ("load_state", "the check calls loader.load_state(state)"),
    ),
    unexplained="step s uses places s · batch to (s + 1) · batch of all epochs, one after another, on any number of ranks",
)

# Traffic


def _little(share: float, what: str, hint: str) -> Judge:
    """The ranks together send about as little as ours, in about as few calls."""

    def of(seen: Seen) -> list[int]:
        return [call.bytes for call in seen.calls if len(call.ranks) > 1 and call.op != "recv"]

    def verdict(trial: Trial, right: Right) -> Verdict:
        got, ours = ([count for seen in ranks for count in of(seen)] for ranks in (trial.seen, right))
        if sum(got) > sum(ours) + getattr(trial.case, "room", 64) * trial.n:
            return Verdict(False, f"the ranks sent {size(sum(got))} together; {size(sum(ours))} are enough", hint)
        if len(got) > 2 * len(ours) + 2 * trial.n:
            return Verdict(False, f"the ranks made {len(got)} calls together; {len(ours)} are enough", hint)
        return Verdict(True)

    return by(share, what, verdict, lambda seen: {"bytes": sum(of(seen))})._replace(needs=1)


# Task 4: the newest checkpoint that's whole


def _newest(case: Checkpoints, function: Callable, watch: Watch) -> dict:
    manifests, files = case.made(watch.seed)
    with Disk(files).mounted() as disk:
        found = function(manifests)
    if not (found is None or isinstance(found, str)):
        raise Stopped(f"newest_whole returned {kind_of(found)}", "it returns a checkpoint's name, or None")
    name = "none" if found is None else found[:60] or "an empty name"
    return {"the checkpoint": name, "bytes that it has read": disk.read // case.tried}


_READS = "a rank reads files[rank::n] of the newest checkpoint, then of the one before, and no more once one is whole"
_READ = "it has read {got} per checkpoint that has to be looked at; {right} are enough"
newest_whole = _task(
    "newest_whole",
    4,
    _newest,
    (
        values(0.6, "all ranks return the newest whole checkpoint", "the checkpoint"),
        _at_most(0.2, "each rank reads its share, and stops in time", "bytes", _READS, 6_000, _READ)._replace(needs=1),
        _little(0.2, "ranks send one flag per checkpoint", "one all-reduce with MIN per checkpoint that's looked at: 8 bytes"),
    ),
    cases=given.CHECKPOINTS,
    more=given.drawn_checkpoints,
    only_two="on 2 ranks, one message reaches everyone; on 3, every rank needs the flags of all others",
    call="newest_whole(manifests)",
    unexplained="whole: each file of the manifest is there, is as long as it says, and has that crc32",
    advice=(
        ("FileNotFoundError", "a file may be missing, and only the rank that reads it sees that: catch OSError there"),
        ("no attribute 'glob'|scandir", "the manifest says which files there are"),
    ),
)

# Task 5: the odd one out


def _odd(case: Odd, function: Callable, watch: Watch) -> dict:
    form = "it returns a list of ranks, an empty one if all agree"
    with given.no_salt():
        found = function(case.made(dist.get_rank(), dist.get_world_size(), watch.seed))
    return {"the list of ranks": str(sorted(whole(one, "a rank", form) for one in items(found, "the list", form, 64)))}


_DIGEST = "a crc32 of all bytes says whether two replicas are equal: 8 bytes per rank, in one all-gather"
odd_ones = _task(
    "odd_ones",
    4,
    _odd,
    (
        values(0.75, "finds the replicas that have gone wrong"),
        _little(0.25, "ranks send a checksum each, not their parameters", _DIGEST),
    ),
    cases=given.ODDS,
    call="odd_ones(parameters)",
    only_two="on 2 ranks nobody can tell who is wrong; look at 3",
    unexplained="compare bits, not numbers; the majority is more than half of the ranks, and without one all are suspect",
    advice=(("(unsupported|Unsupported).*BFloat16|ScalarType BFloat16", "numpy has no bfloat16: view(torch.uint8) first"),),
)

# Task 6: a step with whoever is there


def _stepped(case: Roles, function: Callable, watch: Watch) -> dict:
    rank = dist.get_rank()
    replica, gradient = case.made(rank, watch.seed)
    done = function(replica, gradient, case.roles[rank], case.least)
    if not isinstance(done, bool | bool_):
        raise Stopped(f"quorum_step returned {kind_of(done)}", "it returns True or False: whether a step was taken")
    names = {"the weights": "weights_P", "the first moments": "first_P", "the second moments": "second_P"}
    found = {name: plain(getattr(replica, field)) for name, field in names.items()}
    found["the number of steps"] = _count(replica.steps, "replica.steps", "a number")
    return found | {"whether a step was taken": bool(done)}


_BACK = "who's back takes weights, moments and the counter from one healthy rank; without one nobody sends them"
quorum_step = _task(
    "quorum_step",
    5,
    _stepped,
    (
        values(0.75, "all replicas have done the same step, or none has"),
        _little(0.25, "ranks send a role, one gradient, and a state only if someone is back", _BACK),
    ),
    cases=given.quorums,
    only_two="on 2 ranks, there is one other rank; on 3, roles and gradients of all others count",
    call="quorum_step(replica, gradient_P, role, least)",
    unexplained="the mean is over healthy ranks only; who is back gets all of a healthy one first; then all take the step",
)

# Task 7: a log

_NAMES = {"failed": "the rank", "call": "the call", "straggler": "the slow rank", "resume": "the checkpoint's step"}
_NAMES |= {"repeat": "the number of steps to repeat", "goodput": "the goodput"}
_FORM = "it returns a dict: " + "{" + ", ".join(f'"{name}": …' for name in _NAMES) + "}"


def _read(case: Sick, function: Callable, watch: Watch) -> dict:
    found = function(given.log(case.seed))
    if not isinstance(found, dict) or not found.keys() >= _NAMES.keys():
        raise Stopped(f"autopsy returned {kind_of(found)}", _FORM)
    kinds = {"call": lambda value, *_: f"{value}"[:80], "goodput": number}
    return {name: kinds.get(key, whole)(found[key], key, _FORM) for key, name in _NAMES.items()}


_found = partial(values, alone=True, part=True)
autopsy = _alone(
    "autopsy",
    4,
    _read,
    (
        _found(0.35, "which rank stopped, and in which call", "the rank|the call"),
        _found(0.15, "which rank is slow", "slow"),
        _found(0.25, "where to resume, and how many steps to repeat", "checkpoint|repeat"),
        _found(0.25, "the goodput", "goodput", hint="usual seconds of a step · steps that are kept ÷ the last line's seconds"),
    ),
    cases=(Sick(1), Sick(2), Sick(3)),
    more=lambda random: [Sick(random.randrange(10, 10**9)) for _ in range(4)],
    call="autopsy(log)",
)
