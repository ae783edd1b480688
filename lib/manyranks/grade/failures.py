"""Checks of exercise 12_failures: saves that survive a crash, how often to save, exact resumes, and ranks that went wrong."""

import builtins
from collections.abc import Callable, Mapping
from copy import deepcopy
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from numpy import bool_

from manyranks.given import disk as disks
from manyranks.given import failures as given
from manyranks.given.disk import FOLDER, Disk
from manyranks.given.failures import PATH, Checkpoints, Job, Odd, Replica, Resume, Roles, Save, Sick, weight
from manyranks.grade.check import Task
from manyranks.grade.judges import as_bytes, at_most, facts, little, values
from manyranks.grade.learner import Allowed, arguments, dict_of, error_of, items, number, pair, plain, tensor, whole
from manyranks.measure.aliases import replaced
from manyranks.measure.journal import Stopped, kind_of
from manyranks.measure.watch import Watch

_task = partial(Task, "12_failures", allowed=Allowed((given.__name__, disks.__name__)))
_alone = partial(_task, worlds=(1,))
_at_most = partial(at_most, unit=as_bytes, needs=1)

# Task 1: a save that survives a crash. A rank records what happens to its files; what a power cut leaves of them is seen here.

_ANY = "the old one or the new one"


def _saved(own: tuple, function: Callable, watch: Watch) -> dict:
    before, new, others, newer, folder = own
    contents, errors, steps, seconds = [], [], [], []

    def second() -> None:  # another rank's save comes between two steps
        if not seconds:
            seconds.append("")
            seconds[0] = error_of(function, f"{folder}/rank-1.bin", [*others])

    with (one := Disk(before, contents, watch.folder)).mounted(function):
        function(PATH, [*new])
    runs = [(FOLDER, one.halfway, newer, {"trouble": "short"}), (folder, {}, new, {"look": second})]
    runs += [(FOLDER, before, new, {"trouble": "full"})]
    for where, files, parts, more in runs:
        with (disk := Disk(files, contents, watch.folder, folder=where, **more)).mounted(function):
            errors.append(error_of(function, f"{where}/rank-0.bin", [*parts]))
        steps.append(disk.steps)
    return {"contents": [each.decode("latin-1") for each in contents], "steps": [one.steps, *steps], "errors": errors + seconds}


def _after_cuts(steps: list, contents: list[bytes], path: str = PATH) -> list[list[bytes | None]]:
    """Lists what the file can hold if the power fails after each step, the least first; None: there is no file.

    Data is safe after fsync of its file, and a name after fsync of the folder. Names that aren't safe yet come to the disk in
    order, but any number of them; data that isn't safe comes in full, in part, or not at all.
    """
    now, safe, since, left = {}, {}, [], []
    for what, which, found in steps:
        names = {name: place for name, (place, _) in found.items()}
        now |= {place: contents[number] for place, number in found.values()}
        safe = dict(now) if what in ("given", "sync") else safe | ({which: now[which]} if what == "fsync" else {})
        since = since if what not in ("given", "sync", "fsync of the folder") else []
        since = since if names in since[-1:] else [*since, names]
        can = set()
        for place in {each.get(path) for each in since}:
            kept, data = (safe.get(place, b""), now[place]) if place else (None, None)
            can |= {kept, data} if kept == data else {kept, data, data[: len(data) // 2]}
        left.append(sorted(can, key=lambda one: (-1, b"") if one is None else (len(one), one)))
    return left


def _in_words(content: bytes | None, known: dict[bytes | None, str]) -> str:
    """Says what a file holds. known: contents that have a name."""
    if content in known or not content:
        return known.get(content, "no file at all" if content is None else "an empty file")
    full = max(len(one or b"") for one in known)
    return f"{len(content):,} of {full:,} bytes" if len(content) < full else "the bytes of two saves"


def _cut(case: Save, own: tuple, found: Mapping[str, Any]) -> dict:
    """Returns what is judged of what a rank has recorded."""
    contents, records = [text.encode("latin-1") for text in found["contents"]], found["steps"]
    before, *parts, folder = own
    old, (new, another, newer) = before.get(PATH), map(b"".join, parts)
    known, left = {old: "no file yet" if case.first else "the old one", new: "the new one"}, _after_cuts(records[0], contents)
    bad = ((step[0], each) for step, can in zip(records[0], left, strict=True) for each in can if each not in known)
    ends = [{name: contents[number] for name, (_, number) in steps[-1][2].items()} for steps in records]
    saved, again, _, full = (_in_words(end.get(PATH), known | {newer: "the new one"}) for end in ends)
    errors = [error or "no error" for error in found["errors"]]
    if not any(step[0] == "refused" for step in records[3]):  # without an fsync nobody hears of a full disk
        full = known[old]
        errors[2] = "OSError"
    both = [ends[2].get(f"{folder}/rank-{k}.bin") for k in range(2)]
    both = "both whole" if both == [new, another] else "a wrong file"
    return {
        "what the file holds": saved,
        "what a power cut during the save leaves": next(
            (f"{_in_words(each, known)}, after {what}" for what, each in bad), _ANY
        ),
        "what a power cut leaves after the save": " or ".join(_in_words(each, known) for each in left[-1]),
        "the number of other files that the save leaves": len(ends[0].keys() - {PATH}),
        "what two ranks leave that save at once": next(filter(None, found["errors"][1::2]), both),
        "what the next save leaves, after one that was killed": f"{again}, and {errors[0]}",
        "what a full disk leaves": f"{full}, and {errors[2]}",
    }


_then = partial(facts, needs=1)
_FOLDER = "the folder is a list of names: fsync it, too"
_ORDER = "all bytes, under another name in the same folder; flush; fsync; only then os.replace"
atomic_save = _alone(
    "atomic_save(path, parts)",
    5,
    _saved,
    (
        values(0.5, "a power cut at any moment leaves a whole checkpoint", "holds|during", alone=True, hint=_ORDER),
        _then(0.2, "when it has returned, the new one stays", "after the save", _FOLDER),
        _then(0.15, "ranks that save at once don't meet", "at once", "put the file's own name into the temporary one"),
        _then(0.15, "copes with leftovers and a full disk", "other files|next save|full disk"),
    ),
    make=Save.made,
    then=_cut,
    cases=(Save(False), Save(True)),
    advice=(
        ("Invalid cross-device link", "a rename works within one file system: put the temporary file next to the real one"),
        ("Parent directory /checkpoints", "give torch.save a file that you have opened, not a path: you have to fsync it"),
        ("Bad file descriptor|closed file", "write os.fsync(file.fileno()) while the file is open, with `import os` above"),
        ("No such file or directory: '/checkpoints", "the file isn't there: look at the order of writes, renames and removals"),
    ),
)

# Task 2: how often


def _count(value: Any, what: str, form: str) -> int:
    """A whole number; 18.0 is one, too."""
    found = number(value, what, form)
    return int(found) if found.is_integer() else whole(found, what, form)


def _often(case: Job, function: Callable, watch: Watch) -> dict:
    form = "it returns a pair: a number of steps, and the goodput"
    steps, goodput = pair(function(*case), "how_often", form)
    return {"the number of steps": _count(steps, "the number of steps", form), "the goodput": number(goodput, "goodput", form)}


how_often = _alone(
    "how_often(seconds, copy, write, restart, gpu_mtbf, gpus, in_background)",
    3,
    _often,
    (
        values(0.5, "the number of steps between saves", "steps", alone=True, part=True),
        values(0.5, "the goodput with that many steps", "goodput", alone=True, part=True),
    ),
    cases=given.JOBS,
    more=given.drawn_jobs,
)

# Task 3: an exact resume


def _steps(loaders: list, steps: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The samples and the noise of so many steps, of all ranks in order."""
    form = "next(loader) returns a pair: a list of samples, and a tensor of noise"
    samples, noise = [], []
    for _ in range(steps):
        for loader in loaders:
            mine, its = pair(next(loader), "next(loader)", form)
            samples += [whole(one, "a sample", form) for one in items(mine, "the samples", form, 1000)]
            noise.append(tensor(its, "the noise", form).flatten())
    return torch.tensor(samples), torch.cat([torch.empty(0), *noise])


def _resumed(own: tuple, kind: Any, watch: Watch) -> dict:
    """Nothing but the state comes from the one process to the other."""
    samples, batch, seed, ahead, ranks, steps, used, twice = own
    loaders, state = [kind(samples, batch, seed, rank, ranks, ahead) for rank in range(ranks)], [None]
    if dist.get_rank() == 0:
        _steps(loaders, steps)
        fetched = whole(loaders[-1].fetched, "loader.fetched", "leave the counter to fetch()")
        state = [loaders[-1].state()]
        if not isinstance(state[0], dict):
            raise Stopped(f"state() returned {kind_of(state[0])}", "it returns a dict")
        count = weight(state[0])
        dist.broadcast_object_list([*state])
        names = "the samples of the loader that keeps training", "the noise of the loader that keeps training"
        found = {"the number of batches it has fetched": fetched, "the state": count}
        return found | dict(zip(names, _steps(loaders, 5), strict=True))
    _steps(loaders, 3 * used)
    dist.broadcast_object_list(state)
    for again in range(1 + twice):
        state = [loaders[-1].state()] if again else state
        for loader in loaders:
            loader.load_state(deepcopy(state[0]))
    return dict(zip(("the samples after the resume", "the noise after the resume"), _steps(loaders, 5), strict=True))


loader = _task(
    "Loader(samples, batch, seed, rank, ranks, ahead)",
    5,
    _resumed,
    (
        values(0.45, "the samples go on as if nothing had happened", "samples", alone=True),
        facts(0.35, "and so does the noise", "noise", "keep the generator's state from before each fetch, and save that"),
        facts(0.1, "reads ahead", "fetched", "__next__ fills the queue until `ahead` batches are left in it", needs=1),
        _at_most(0.1, "the state is small", "the state", "a step and a generator's state are enough", 2000),
    ),
    make=Resume.made,
    cases=given.RESUMES,
    more=given.drawn_resumes,
    worlds=(2,),
    advice=(
        ("pop from an empty deque", "fill the queue until it holds ahead + 1 batches, and then take one: `ahead` may be 0"),
        (arguments("Loader"), "derive it from Batches"),
        (arguments("state"), "the check calls loader.state()"),
        (arguments("load_state"), "the check calls loader.load_state(state)"),
    ),
    unexplained="load_state empties the queue; step s uses places s · batch to (s + 1) · batch, on any number of ranks",
)

# Task 4: the newest checkpoint that's whole


def _newest(own: tuple[dict, dict[str, bytes]], function: Callable, watch: Watch) -> dict:
    manifests, files = own
    disk = Disk(files, None, watch.folder)
    del own, files  # what they held is on the disk only
    with disk.mounted(function):
        found = function(manifests)
    if not (found is None or isinstance(found, str)):
        raise Stopped(f"newest_whole returned {kind_of(found)}", "it returns a checkpoint's name, or None")
    name = "none" if found is None else found[:60] or "an empty name"
    return {"the checkpoint": name, "bytes that it has read": disk.opened}


def _per_checkpoint(case: Checkpoints, own: tuple, found: Mapping[str, Any]) -> dict:
    """Divides the bytes read by the number of checkpoints that have to be read, in part."""
    tried = min((*case.harms, "").index("") + 1, len(case.harms))
    return {**found, "bytes that it has read": found["bytes that it has read"] // tried}


_READS = "a rank reads files[rank::n] of the newest checkpoint, then of the one before, and no more once one is whole"
_READ = "it has read {got} per checkpoint that has to be looked at; {right} are enough"
newest_whole = _task(
    "newest_whole(manifests)",
    4,
    _newest,
    (
        values(0.6, "all ranks return the newest whole checkpoint", "the checkpoint"),
        _at_most(0.2, "each rank reads its share, and stops in time", "bytes", _READS, 6_000, _READ),
        little(0.2, "ranks send one flag per checkpoint", "one all-reduce with MIN per checkpoint that's looked at: 8 bytes"),
    ),
    make=lambda case, rank, n, seed: case.made(seed),
    then=_per_checkpoint,
    cases=given.CHECKPOINTS,
    more=given.drawn_checkpoints,
    unexplained="whole: each file of the manifest is there, is as long as it says, and has that crc32",
    advice=(
        ("FileNotFoundError", "a file may be missing, and only the rank that reads it sees that: catch OSError there"),
        ("no attribute 'glob'|scandir", "the manifest says which files there are"),
    ),
)

# Task 5: the odd one out


def _odd(parameters: list[torch.Tensor], function: Callable, watch: Watch) -> dict:
    form = "it returns a list of ranks, an empty one if all agree"
    with replaced({(builtins, "hash"): partial(given.unsalted, hash)}, function):
        found = function(parameters)
    return {"the list of ranks": str(sorted(whole(one, "a rank", form) for one in items(found, "the list", form, 64)))}


_DIGEST = "a crc32 of all bytes says whether two replicas are equal: 8 bytes per rank, in one all-gather"
odd_ones = _task(
    "odd_ones(parameters)",
    4,
    _odd,
    (
        values(0.75, "finds the replicas that have gone wrong"),
        little(0.25, "ranks send a checksum each, not their parameters", _DIGEST),
    ),
    make=Odd.made,
    cases=given.ODDS,
    worlds=(2, 3, 4, 5),  # of 5, two may agree and be no half
    more=lambda random: random.sample((*given.ODDS, *given.ODDS[:1] * 2), 4),  # some agree, at no fixed place
    unexplained="compare bits, not numbers; the majority is more than half of the ranks, and without one all are suspect",
    advice=(("(unsupported|Unsupported).*BFloat16|ScalarType BFloat16", "numpy has no bfloat16: view(torch.uint8) first"),),
)

# Task 6: a step with whoever is there


def _stepped(own: tuple[Replica, torch.Tensor, str, int], function: Callable, watch: Watch) -> dict:
    replica, *_ = own
    done = function(*own)
    if not isinstance(done, bool | bool_):
        raise Stopped(f"quorum_step returned {kind_of(done)}", "it returns True or False: whether a step was taken")
    names = {"the weights": "weights_P", "the first moments": "first_P", "the second moments": "second_P"}
    found = {name: plain(getattr(replica, field)) for name, field in names.items()}
    found["the number of steps"] = _count(replica.steps, "replica.steps", "a number")
    return found | {"whether a step was taken": bool(done)}


_BACK = "a rank that's back takes weights, moments and the counter from one healthy rank; without one nobody sends them"
quorum_step = _task(
    "quorum_step(replica, gradient_P, role, least)",
    5,
    _stepped,
    (
        values(0.75, "all replicas have done the same step, or none has"),
        little(0.25, "ranks send a role, one gradient, and a state only if someone is back", _BACK),
    ),
    make=Roles.made,
    cases=given.quorums,
    unexplained="the mean is of healthy ranks only; a rank that's back gets all of a healthy one first; then all take the step",
)

# Task 7: a log

_NAMES = {"failed": "the rank", "call": "the call", "straggler": "the slow rank", "resume": "the checkpoint's step"}
_NAMES |= {"repeat": "the number of steps to repeat", "goodput": "the goodput"}
_FORM = dict_of(_NAMES)


def _read(log: list, function: Callable, watch: Watch) -> dict:
    found = function(log)
    if not isinstance(found, dict) or not found.keys() >= _NAMES.keys():
        raise Stopped(f"autopsy returned {kind_of(found)}", _FORM)
    kinds = {"call": lambda value, *_: f"{value}"[:80], "goodput": number}
    return {name: kinds.get(key, whole)(found[key], key, _FORM) for key, name in _NAMES.items()}


_found = partial(values, alone=True, part=True)
autopsy = _alone(
    "autopsy(log)",
    4,
    _read,
    (
        _found(0.35, "which rank stopped, and in which call", "the rank|the call"),
        _found(0.15, "which rank is slow", "slow"),
        _found(0.25, "where to resume, and how many steps to repeat", "checkpoint|repeat"),
        _found(0.25, "the goodput", "goodput", hint="usual seconds of a step · steps that are kept ÷ the last line's seconds"),
    ),
    make=lambda case, rank, n, seed: given.log(case.seed),
    cases=(Sick(1), Sick(2), Sick(3)),
    more=lambda random: [Sick(random.randrange(10, 10**9)) for _ in range(8)],
)
