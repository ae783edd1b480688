"""Answers to 12_failures: what is right, and the mistakes that are made."""

import hashlib
import math
import os
import statistics
import tempfile
import uuid
import zlib
from collections import Counter, deque
from contextlib import suppress
from os import fdatasync, rename, sync
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from manyranks.grade.answers import also_right, mistake, right, slip

# fmt: off

@right("atomic_save")
class AtomicSave:
    def __call__(self, path, parts):
        name = self.name(path)
        with open(name, "wb") as file:
            for part in parts:
                file.write(part)
            self.finish(file)
        self.publish(name, path)
        self.fsync_folder(path)

    def name(self, path):
        return f"{path}.tmp"

    def finish(self, file):
        file.flush()
        os.fsync(file.fileno())

    def publish(self, name, path):
        os.replace(name, path)

    def fsync_folder(self, path):
        folder = os.open(os.path.dirname(path), os.O_RDONLY)
        os.fsync(folder)
        os.close(folder)

@also_right("atomic_save")
def with_pathlib(path, parts):
    name = Path(path).with_name(f"{Path(path).name}.{uuid.uuid4().hex}")
    try:
        with name.open("wb", buffering=0) as file:
            left = b"".join(parts)
            while left:
                left = left[file.write(left) :]
            os.fsync(file)
    except OSError:
        name.unlink()
        raise
    name.replace(path)
    folder = os.open(name.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)

@also_right("atomic_save")
def with_tempfile(path, parts):
    with tempfile.NamedTemporaryFile("wb", dir=os.path.dirname(path), delete=False) as file:
        file.writelines(parts)
        file.flush()
        fdatasync(file.fileno())
    rename(file.name, path)
    sync()

@also_right("atomic_save")
class WithDescriptors(AtomicSave):
    def __call__(self, path, parts):
        number = os.open(f"{path}-new", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for part in parts:
            self.write(number, part)
        os.fsync(number)
        os.close(number)
        self.publish(f"{path}-new", path)
        self.fsync_folder(path)

    def write(self, number, part):
        while part:
            part = part[os.write(number, part) :]

slip("atomic_save", "InPlace", 0,
    "the old checkpoint is emptied before the new one is written: write under another name, then rename", AtomicSave,
    name=lambda self, path: path, publish=lambda self, name, path: None)
slip("atomic_save", "NoFsync", 0,
    "the name reaches the disk and the data doesn't: fsync the file before the rename, after a flush, or Python still has it",
    AtomicSave, finish=lambda self, file: file.flush())

@mistake(
    "atomic_save",
    "fsync came before flush: what Python still had in its buffer wasn't there to be written. First flush, then fsync",
)
class FsyncBeforeFlush(AtomicSave):
    def finish(self, file):
        os.fsync(file.fileno())
        file.flush()

@mistake("atomic_save", "between the removal and the rename there's no checkpoint at all: os.replace needs no removal")
class RemovesTheOld(AtomicSave):
    def publish(self, name, path):
        if os.path.exists(path):
            os.remove(path)
        os.rename(name, path)

@mistake("atomic_save", "a copy is no rename: it empties the old file and fills it again. os.replace swaps the name at once")
class CopiesBack(AtomicSave):
    def publish(self, name, path):
        with open(name, "rb") as source, open(path, "wb") as file:
            file.write(source.read())
            self.finish(file)
        os.remove(name)

slip("atomic_save", "InAnotherFolder", 0, "a rename works within one file system: put the temporary file next to the real one",
    AtomicSave, name=lambda self, path: os.path.join(tempfile.gettempdir(), f"{os.getpid()}-{os.path.basename(path)}"))
slip("atomic_save", "NoFsyncOfTheFolder", 4, "", AtomicSave, says="the folder is a list of names: fsync it, too",
    fsync_folder=lambda self, path: None)
slip("atomic_save", "OneNameForAll", 4.25,
    "one rank takes another's temporary file: put the checkpoint's name into its name, and leave those of other ranks alone",
    AtomicSave, says="what two ranks leave that save at once",
    name=lambda self, path: os.path.join(os.path.dirname(path), "checkpoint.tmp"))

@mistake(
    "atomic_save", "the caller has to hear of a full disk: let the OSError go on, or the run believes in a save", points=4.25
)
def swallows_errors(path, parts):
    with suppress(OSError):
        AtomicSave()(path, parts)

slip("atomic_save", "TakesShortWrites", 4.25,
    "write returns how many bytes it has written, and that may be fewer than you gave it: write the rest, until none is left",
    WithDescriptors, write=lambda self, number, part: os.write(number, part))

@mistake("atomic_save", says="while the file is open")
class FsyncOfAClosedFile(AtomicSave):
    def finish(self, file):
        file.close()
        os.fsync(file.fileno())

@right("how_often")
class HowOften:
    def __call__(self, seconds, copy, write, restart, gpu_mtbf, gpus, in_background):
        mtbf = self.mtbf(gpu_mtbf, gpus)
        stall, lag = self.stall_and_lag(copy, write, in_background)
        steps = self.steps(seconds, self.young(stall, mtbf), lag)
        interval = steps * seconds
        return steps, 1 - stall / interval - (restart + self.lost(interval) + lag) / mtbf

    def mtbf(self, gpu_mtbf, gpus):
        return gpu_mtbf / gpus

    def stall_and_lag(self, copy, write, in_background):
        return (copy, write) if in_background else (copy + write, 0.0)

    def young(self, stall, mtbf):
        return math.sqrt(2 * stall * mtbf)

    def lost(self, interval):
        return interval / 2

    def steps(self, seconds, interval, lag):
        return max(round(interval / seconds), math.ceil(lag / seconds), 1)

@also_right("how_often")
def searched(seconds, copy, write, restart, gpu_mtbf, gpus, in_background):
    rate = gpus / gpu_mtbf
    stall, lag = (copy, write) if in_background else (copy + write, 0)
    tau = (2 * stall / rate) ** 0.5
    k = int(tau / seconds + 0.5)
    while k < 1 or k * seconds < lag:
        k += 1
    return torch.tensor(float(k)), 1.0 - (stall / (k * seconds) + rate * (restart + lag + k * seconds / 2))

slip("how_often", "OneGPU", 0, "that's the time between failures of one GPU: a job of N GPUs fails N times as often", HowOften,
    mtbf=lambda self, gpu_mtbf, gpus: gpu_mtbf)
slip("how_often", "StandsStillForAll", 0, "the write goes on in the background: only the copy makes training stand still",
    HowOften, stall_and_lag=lambda self, copy, write, in_background: (copy + write, 0.0))
slip("how_often", "NeverStandsStill", 0,
    "without a thread, training stands still for the write, too: the stall is copy + write", HowOften,
    stall_and_lag=lambda self, copy, write, in_background: (copy, write if in_background else 0.0))

@mistake(
    "how_often",
    "a checkpoint can't be used before its write has ended: a failure loses the write's seconds as well",
    points=1.5,
)
class ForgetsTheWrite(HowOften):
    share = 1.0

    def __call__(self, *case):
        steps, goodput = super().__call__(*case)
        lag = self.share * self.stall_and_lag(case[1], case[2], case[6])[1]
        return steps, goodput + lag / self.mtbf(*case[4:6])

@mistake("how_often", "a failure costs the whole write, not half: the newest whole checkpoint is a write older", points=1.5)
class HalfAWrite(ForgetsTheWrite):
    share = 0.5

slip("how_often", "NoTwo", 0, "Young's interval is √(2 · stall · mtbf): the 2 is missing", HowOften,
    young=lambda self, stall, mtbf: math.sqrt(stall * mtbf))
slip("how_often", "TooSoon", 0,
    "a save can't begin before the last one's write has ended: that takes write ÷ seconds steps at least", HowOften,
    steps=lambda self, seconds, interval, lag: max(round(interval / seconds), 1))
slip("how_often", "LosesAll", 1.5, "on average a failure loses half an interval, not all of it", HowOften,
    lost=lambda self, interval: interval)
slip("how_often", "InSeconds", 0, "the interval is in seconds: divide it by the seconds of a step", HowOften,
    steps=lambda self, seconds, interval, lag: max(round(interval), math.ceil(lag)))
slip("how_often", "NoRestart", 1.5, "every failure costs a restart, too", HowOften,
    __call__=lambda self, seconds, copy, write, restart, *rest: HowOften.__call__(self, seconds, copy, write, 0.0, *rest))
slip("how_often", "RoundsTheWrite", 0, "the write has to end before the next copy: round its steps up, not to the nearest",
    HowOften, steps=lambda self, seconds, interval, lag: max(round(interval / seconds), round(lag / seconds), 1))
slip("how_often", "CutsOff", 0, "round to the nearest number of steps: int() cuts off what's behind the point", HowOften,
    steps=lambda self, seconds, interval, lag: max(int(interval / seconds), math.ceil(lag / seconds), 1))

class Batches:
    """As in the notebook."""

    def __init__(self, samples, batch, seed, rank, ranks, ahead):
        self.samples, self.batch, self.seed = samples, batch, seed
        self.rank, self.ranks, self.ahead = rank, ranks, ahead
        self.generator = torch.Generator().manual_seed(seed)
        self.fetched, self.queue = 0, deque()

    def order(self, epoch):
        shuffle = torch.Generator().manual_seed(self.seed + epoch)
        return torch.randperm(self.samples, generator=shuffle).tolist()

    def fetch(self):
        first = self.fetched * self.batch
        places = [divmod(first + i, self.samples) for i in range(self.batch)]
        orders = {epoch: self.order(epoch) for epoch, _ in places}
        batch = [orders[epoch][at] for epoch, at in places]
        noise = torch.rand(self.batch, generator=self.generator, dtype=torch.float64)
        self.fetched += 1
        mine = self.batch // self.ranks
        part = slice(self.rank * mine, (self.rank + 1) * mine)
        return batch[part], noise[part]

@right("Loader")
class Loader(Batches):
    """Notes with each batch how the generator was before it was fetched."""

    used = 0

    def __next__(self):
        while len(self.queue) <= self.ahead:
            before = self.generator.get_state()
            self.queue.append((self.fetch(), before))
        self.used += 1
        return self.queue.popleft()[0]

    def state(self):
        before = self.queue[0][1] if self.queue else self.generator.get_state()
        return {"used": self.used, "generator": before}

    def load_state(self, state):
        self.queue.clear()
        self.fetched = self.used = state["used"]
        self.generator.set_state(state["generator"])

@also_right("Loader")
class Replays(Loader):
    """Draws all noise again."""

    def state(self):
        return {"step": self.fetched - len(self.queue)}

    def load_state(self, state):
        self.queue, self.fetched = deque(), state["step"]
        self.generator = torch.Generator().manual_seed(self.seed)
        for _ in range(self.fetched):
            torch.rand(self.batch, generator=self.generator, dtype=torch.float64)

slip("Loader", "CountsFetched", 0,
    "batches that were read ahead are skipped: the state is what training has used, not what the loader has fetched", Loader,
    state=lambda self: {"used": self.fetched, "generator": self.generator.get_state()})
slip("Loader", "GeneratorAhead", 3.25,
    "the generator has drawn the noise of batches that nobody has used yet: keep its state from before each fetch", Loader,
    state=lambda self: {"used": self.used, "generator": self.generator.get_state()})

@mistake("Loader", "the generator begins again with its seed, and the noise repeats itself: save its state, too", points=3.25)
class ForgetsTheGenerator(Loader):
    def load_state(self, state):
        super().load_state(state | {"generator": torch.Generator().manual_seed(self.seed).get_state()})

@mistake("Loader", "the epoch begins again: save the place in it, too", points=1.75)
class RestartsTheEpoch(Loader):
    def load_state(self, state):
        super().load_state(state)
        self.fetched = self.used = state["used"] * self.batch // self.samples * self.samples // self.batch

@mistake(
    "Loader",
    "the state counts one rank's samples, and another number of ranks makes another place of it: count steps, or all samples",
    points=1.75,
)
class CountsItsOwn(Loader):
    def state(self):
        return super().state() | {"samples": self.used * self.batch // self.ranks}

    def load_state(self, state):
        super().load_state(state)
        self.fetched = self.used = state["samples"] * self.ranks // self.batch

QUEUE = "batches that it had read ahead before load_state are still in the queue: throw them away"

@mistake("Loader", QUEUE)
class KeepsTheQueue(Loader):
    def load_state(self, state):
        queue = self.queue.copy()
        super().load_state(state)
        self.queue = queue

slip("Loader", "KeepsItAndCountsIt", 0, QUEUE, KeepsTheQueue,
    state=lambda self: Loader.state(self) | {"used": self.fetched - len(self.queue)})
slip("Loader", "SavesTheOrder", 4.5, "the state holds the whole order: a step and a generator's state are enough", Loader,
    state=lambda self: Loader.state(self) | {"order": self.order(0)})

@mistake("Loader", "nothing is read ahead, so every step waits for its batch: keep `ahead` batches in the queue", points=4.5)
class ReadsNothingAhead(Loader):
    def __next__(self):
        return self.fetch()

    def state(self):
        return {"fetched": self.fetched, "generator": self.generator.get_state()}

    def load_state(self, state):
        self.fetched = state["fetched"]
        self.generator.set_state(state["generator"])

slip("Loader", "TakesItForFull", 1.75,
    "the queue isn't always full: it's empty before the first batch and after load_state. Subtract len(self.queue), not ahead",
    Loader, state=lambda self: Loader.state(self) | {"used": self.fetched - self.ahead})

class Plain(Loader):
    def __next__(self):
        while len(self.queue) <= self.ahead:
            self.queue.append(self.fetch())
        return self.queue.popleft()

    def state(self):
        return {"used": self.fetched, "generator": self.generator.get_state()}

@mistake(
    "Loader",
    "the new loader's queue is empty, and the old one's batches are lost: save the place of the first batch in the queue",
)
class ForgetsTheQueue(Plain):
    def load_state(self, state):
        self.fetched = state["used"]
        self.generator.set_state(state["generator"])

slip("Loader", "SavesTheObject", 0, "", Loader, says="state() has a Generator in it",
    state=lambda self: {"used": self.used, "generator": self.generator})

@right("newest_whole")
class NewestWhole:
    def __call__(self, manifests):
        for name in self.names(manifests):
            mine = sorted(manifests[name].items())[dist.get_rank() :: dist.get_world_size()]
            if self.agree(sum(self.is_whole(path, *file) for path, file in mine) == len(mine)):
                return name
        return None

    def names(self, manifests):
        return sorted(manifests, key=lambda name: int(name.removeprefix("step-")), reverse=True)

    def is_whole(self, path, size, crc32):
        try:
            with open(path, "rb") as file:
                data = file.read()
        except OSError:
            return False
        return len(data) == size and zlib.crc32(data) == crc32

    def agree(self, mine):
        flag = torch.tensor(int(mine))
        dist.all_reduce(flag, dist.ReduceOp.MIN)
        return bool(flag)

@also_right("newest_whole")
class SizesFirst(NewestWhole):
    def is_whole(self, path, size, crc32):
        if not os.path.exists(path) or os.path.getsize(path) != size:
            return False
        total = 0
        with open(path, "rb") as file:
            while chunk := file.read(1000):
                total = zlib.crc32(chunk, total)
        return total == crc32

    def agree(self, mine):
        flags = [None] * dist.get_world_size()
        dist.all_gather_object(flags, mine)
        return all(flags)

@also_right("newest_whole")
class CountsTheBroken(NewestWhole):
    """Other shares, and pathlib."""

    def __call__(self, manifests):
        for name in self.names(manifests):
            paths = list(manifests[name])
            first, last = (len(paths) * (dist.get_rank() + k) // dist.get_world_size() for k in (0, 1))
            broken = torch.tensor([sum(not self.is_whole(path, *manifests[name][path]) for path in paths[first:last])])
            dist.all_reduce(broken)
            if not broken:
                return name

    def is_whole(self, path, size, crc32):
        data = Path(path).read_bytes() if Path(path).is_file() else b""
        return (len(data), zlib.crc32(data)) == (size, crc32)

@mistake(
    "newest_whole", "each rank has looked at its own files only, and they disagree: an all-reduce with MIN tells all of them"
)
class NobodyAgrees(NewestWhole):
    def agree(self, mine):
        dist.all_reduce(torch.tensor(int(mine)), dist.ReduceOp.MIN)
        return mine

slip("newest_whole", "LooksAtNothing", 0, "nobody has looked at the files: that's the newest one, whole or not", NewestWhole,
    is_whole=lambda self, path, size, crc32: True)

@mistake("newest_whole", "one rank's file is harmed and another's isn't: with MAX one whole share is enough. MIN")
class Any(NewestWhole):
    def agree(self, mine):
        flag = torch.tensor(int(mine))
        dist.all_reduce(flag, dist.ReduceOp.MAX)
        return bool(flag)

slip("newest_whole", "SortsWords", 0, "as words, step-990 comes after step-1000: compare the numbers", NewestWhole,
    names=lambda self, manifests: sorted(manifests, reverse=True))
slip("newest_whole", "SizesOnly", 0, "a file of the right length may still have a flipped bit: compare its crc32", NewestWhole,
    is_whole=lambda self, path, size, crc32: os.path.exists(path) and os.path.getsize(path) == size)

@mistake("newest_whole", "a file that is longer than the manifest says isn't what was written: compare its length, too")
class ReadsAsMuch(NewestWhole):
    def is_whole(self, path, size, crc32):
        try:
            with open(path, "rb") as file:
                return zlib.crc32(file.read(size)) == crc32
        except OSError:
            return False

@mistake("newest_whole", "a file may be missing, and only the rank that reads it sees that: catch OSError there")
class Unprepared(NewestWhole):
    def is_whole(self, path, size, crc32):
        with open(path, "rb") as file:
            data = file.read()
        return len(data) == size and zlib.crc32(data) == crc32

@mistake("newest_whole", "every rank reads every file: N ranks read N times as much. Each takes a share", points=3.2)
class ReadsAll(NewestWhole):
    def __call__(self, manifests):
        for name in self.names(manifests):
            if self.agree(all(self.is_whole(path, *file) for path, file in manifests[name].items())):
                return name

@mistake("newest_whole", "files are left over when ranks don't divide their number, and nobody reads them: files[rank::n]")
class DropsTheRest(NewestWhole):
    def __call__(self, manifests):
        for name in self.names(manifests):
            files, rank = sorted(manifests[name].items()), dist.get_rank()
            k = len(files) // dist.get_world_size()
            if self.agree(all(self.is_whole(path, *file) for path, file in files[rank * k : (rank + 1) * k])):
                return name

@mistake("newest_whole", says="the checkpoint is")
def reads_nothing(manifests):
    dist.all_reduce(torch.tensor(1), dist.ReduceOp.MIN)
    return NewestWhole().names(manifests)[4]

def bytes_of(tensor):
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()

@right("odd_ones")
class OddOnes:
    def __call__(self, parameters):
        mine = torch.tensor([self.checksum(parameters)])
        rows = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(rows, mine)
        return self.odd([row.item() for row in rows])

    def checksum(self, parameters):
        total = 0
        for parameter in parameters:
            total = zlib.crc32(bytes_of(parameter), total)
        return total

    def odd(self, sums):
        common, count = Counter(sums).most_common(1)[0]
        if 2 * count <= len(sums):
            return list(range(len(sums)))
        return [rank for rank, one in enumerate(sums) if one != common]

@also_right("odd_ones")
class WithSHA(OddOnes):
    def __call__(self, parameters):
        digest = hashlib.sha256()
        for parameter in parameters:
            digest.update(bytes_of(parameter))
        mine = torch.frombuffer(bytearray(digest.digest()), dtype=torch.uint8)
        rows = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(rows, mine)
        table = torch.stack(rows)
        equal = (table[:, None] == table[None]).all(-1)
        trusted = equal.sum(1) * 2 > len(table)
        return torch.nonzero(~trusted).flatten() if trusted.any() else torch.arange(len(table))

@also_right("odd_ones")
class InATable(OddOnes):
    def __call__(self, parameters):
        table = torch.zeros(dist.get_world_size(), dtype=torch.int64)
        table[dist.get_rank()] = self.checksum(parameters)
        dist.all_reduce(table)
        return self.odd(table.tolist())

slip("odd_ones", "Nobody", 0,
    "nobody is ever found, so nothing was compared: gather one checksum per rank, and look for those that differ", OddOnes,
    odd=lambda self, sums: [])

@mistake("odd_ones", "a sum over the bytes doesn't notice a swap: crc32 depends on their order")
class SumsOfBytes(OddOnes):
    def checksum(self, parameters):
        return sum(parameter.contiguous().view(torch.uint8).long().sum().item() for parameter in parameters)

slip("odd_ones", "FirstOnly", 0, "only the first parameter is looked at: the checksum goes over all of them", OddOnes,
    checksum=lambda self, parameters: OddOnes.checksum(self, parameters[:1]))
slip("odd_ones", "Cleans", 0,
    "-0.0 and 0.0 have different bits: nan_to_num and + 0 change what you compare. Take the bytes as they are", OddOnes,
    checksum=lambda self, parameters: OddOnes.checksum(self, [parameter + 0 for parameter in parameters]))
slip("odd_ones", "Rounded", 0, "float32 is rounded to 16 bits on its way: the lowest bits are gone. Take the bytes as they are",
    OddOnes, checksum=lambda self, parameters: OddOnes.checksum(self, [parameter.bfloat16() for parameter in parameters]))
slip("odd_ones", "TrustsRankZero", 0, "rank 0 may be the one that's wrong: the majority decides, not rank 0", OddOnes,
    odd=lambda self, sums: [rank for rank, one in enumerate(sums) if one != sums[0]])

@mistake(
    "odd_ones",
    "no value has more than half of the ranks behind it: then all of them are suspect, not just some",
    on=(2, 3, 4),
)
class Plurality(OddOnes):
    def odd(self, sums):
        common = Counter(sums).most_common(1)[0][0]
        return [rank for rank, one in enumerate(sums) if one != common]

slip("odd_ones", "AsFloats", 0,
    "an int64 is a parameter, too, and has more bits than a float: take the bytes of all parameters, as they are", OddOnes,
    checksum=lambda self, parameters: OddOnes.checksum(self, [parameter.double() for parameter in parameters]))
slip("odd_ones", "SumsOfChecksums", 0, "a sum of checksums doesn't notice a swap: one checksum over all, in order", OddOnes,
    checksum=lambda self, parameters: sum(zlib.crc32(bytes_of(parameter)) for parameter in parameters))

@mistake("odd_ones", says="together;", points=3)
class SendsEverything(OddOnes):
    def __call__(self, parameters):
        mine = torch.cat([parameter.contiguous().view(torch.uint8).flatten() for parameter in parameters])
        rows = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(rows, mine)
        return self.odd([bytes_of(row) for row in rows])

@right("quorum_step")
class QuorumStep:
    def __call__(self, replica, gradient, role, least):
        roles = self.roles(role)
        healthy = [rank for rank, one in enumerate(roles) if one == 0]
        if len(healthy) < least:
            return self.skipped(replica)
        gradient = self.part(gradient, role)
        dist.all_reduce(gradient)
        if 2 in roles:
            self.restore(replica, self.source(healthy))
        replica.update(gradient / self.count(healthy))
        return True

    def skipped(self, replica):
        return False

    def roles(self, role):
        mine = torch.tensor([["healthy", "sick", "back"].index(role)])
        rows = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(rows, mine)
        return [row.item() for row in rows]

    def part(self, gradient, role):
        return gradient.clone() if role == "healthy" else torch.zeros_like(gradient)

    def count(self, healthy):
        return len(healthy)

    def source(self, healthy):
        return healthy[0]

    def fields(self, replica):
        return [replica.weights_P, replica.first_P, replica.second_P]

    def restore(self, replica, source):
        steps = torch.tensor([replica.steps])
        for one in (*self.fields(replica), steps):
            dist.broadcast(one, source)
        replica.steps = steps.item()

@also_right("quorum_step")
class OneMessage(QuorumStep):
    """From the last healthy one, to those who are back only."""

    def roles(self, role):
        table = torch.zeros(dist.get_world_size(), dtype=torch.int32)
        table[dist.get_rank()] = ["healthy", "sick", "back"].index(role)
        dist.all_reduce(table)
        self.all = table.tolist()
        return self.all

    def part(self, gradient, role):
        return torch.where(torch.tensor(role == "healthy"), gradient, 0.0)

    def source(self, healthy):
        return healthy[-1]

    def restore(self, replica, source):
        rank = dist.get_rank()
        flat = torch.cat([*self.fields(replica), torch.tensor([replica.steps], dtype=torch.float64)])
        back = [one for one, role in enumerate(self.all) if role == 2]
        if rank == source:
            for one in back:
                dist.send(flat, one)
        if rank in back:
            dist.recv(flat, source)
            replica.weights_P, replica.first_P, replica.second_P = (part.clone() for part in flat[:-1].view(3, -1))
            replica.steps = int(flat[-1])

@also_right("quorum_step")
class AmongTheHealthy(QuorumStep):
    """The sum goes to one healthy rank, and the replica travels as an object; other kinds of numbers."""

    def __call__(self, replica, gradient, role, least):
        roles = self.roles(role)
        healthy = [rank for rank, one in enumerate(roles) if one == 0]
        if len(healthy) < least:
            return np.False_
        total = self.part(gradient, role)
        dist.reduce(total, healthy[0])
        dist.broadcast(total, healthy[0])
        if 2 in roles:
            self.restore(replica, healthy[0])
        replica.update(total / len(healthy))
        replica.steps = float(replica.steps)
        return np.True_

    def restore(self, replica, source):
        dist.broadcast_object_list(found := [replica], source)
        vars(replica).update(vars(found[0]))

slip("quorum_step", "TimesZero", 0,
    "0 · NaN is NaN, and one sick gradient poisons the mean: take zeros in place of it, with torch.where or zeros_like",
    QuorumStep, part=lambda self, gradient, role: gradient * float(role == "healthy"))
slip("quorum_step", "LooksForNaN", 0, "a sick gradient may be finite and wrong: the role says who counts, not the numbers",
    QuorumStep, part=lambda self, gradient, role: gradient.clone() if gradient.isfinite().all() else torch.zeros_like(gradient))
slip("quorum_step", "DividesByAll", 0, "the sum is divided by all ranks: only the healthy ones have added to it", QuorumStep,
    count=lambda self, healthy: dist.get_world_size())
slip("quorum_step", "WeightsOnly", 0, "Adam's moments weren't copied: a rank that's back goes on with others than the rest",
    QuorumStep, fields=lambda self, replica: [replica.weights_P])

@mistake("quorum_step", "Adam's counter wasn't copied: it corrects the moments, so the first steps come out too large")
class NoCounter(QuorumStep):
    def restore(self, replica, source):
        for one in self.fields(replica):
            dist.broadcast(one, source)

slip("quorum_step", "FromRankZero", 0, "rank 0 may be the one that's back, and its weights are NaN: take a healthy rank",
    QuorumStep, source=lambda self, healthy: 0)

@mistake("quorum_step", "sick ranks stay behind: their weights are fine, so they take the step with the others' mean")
class SickSkip(QuorumStep):
    def __call__(self, replica, gradient, role, least):
        before = [one.clone() for one in self.fields(replica)], replica.steps
        done = super().__call__(replica, gradient, role, least)
        if role == "sick":
            (replica.weights_P, replica.first_P, replica.second_P), replica.steps = before
        return done

@mistake("quorum_step", "a step that's skipped changes nothing, not even the counter")
class CountsSkipped(QuorumStep):
    def skipped(self, replica):
        replica.steps += 1
        return False

slip("quorum_step", "NoQuorum", 0, "the quorum is ignored: with fewer than `least` healthy ranks, everyone skips the step",
    QuorumStep, __call__=lambda self, replica, gradient, role, least: QuorumStep.__call__(self, replica, gradient, role, 1))

@mistake("quorum_step", "there's a quorum, and no step was taken: at least `least` ranks are healthy")
def never_steps(replica, gradient, role, least):
    return False

slip("quorum_step", "RestoresNothing", 0,
    "a rank that's back keeps its own worthless replica: it takes weights, moments and counter from a healthy rank", QuorumStep,
    restore=lambda self, replica, source: None)

@mistake("quorum_step", says="are enough", points=3.75)
class GradientsFirst(QuorumStep):
    def roles(self, role):
        dist.all_reduce(torch.zeros(300, dtype=torch.float64))
        return super().roles(role)

@right("autopsy")
class Autopsy:
    def __call__(self, log):
        ranks = sorted({entry.rank for entry in log})
        failed, call = self.culprit(log, ranks)
        times = self.ends(log)
        resume = self.resume(log, ranks)
        goodput = resume * self.step(times) / self.seconds(log, times)
        found = {"failed": failed, "call": call, "straggler": self.straggler(log, ranks), "resume": resume}
        return found | {"repeat": self.last(log) - resume, "goodput": goodput}

    def culprit(self, log, ranks):
        calls = {rank: [entry for entry in log if (entry.rank, entry.kind) == (rank, "enters")] for rank in ranks}
        failed = min(ranks, key=lambda rank: len(calls[rank]))
        return failed, calls[failed][-1].value

    def ends(self, log):
        return {entry.step: entry.seconds for entry in log if entry.kind == "step"}

    def step(self, times):
        return statistics.median(times[step] - times[step - 1] for step in times if step > 1)

    def seconds(self, log, times):
        return log[-1].seconds

    def straggler(self, log, ranks):
        own = {rank: [entry.value for entry in log if (entry.rank, entry.kind) == (rank, "step")] for rank in ranks}
        return max(ranks, key=lambda rank: self.typical(own[rank]))

    def typical(self, values):
        return statistics.median(values)

    def resume(self, log, ranks):
        sizes = {}
        for entry in log:
            if entry.kind == "saved":
                sizes.setdefault(entry.step, {})[entry.rank] = entry.value
        return max(step for step, own in sizes.items() if self.is_whole(own, ranks))

    def is_whole(self, own, ranks):
        return len(own) == len(ranks) and len(set(own.values())) == 1

    def last(self, log):
        return max(entry.step for entry in log if entry.kind == "step")

@also_right("autopsy")
class BySilence(Autopsy):
    def culprit(self, log, ranks):
        (failed,) = set(ranks) - {entry.rank for entry in log if entry.kind == "error"}
        return failed, [entry.value for entry in log if entry.rank == failed][-1]

    def step(self, times):
        laps = sorted(times[step] - times[step - 1] for step in times if step > 1)
        return (laps[(len(laps) - 1) // 2] + laps[len(laps) // 2]) / 2

    def typical(self, values):
        return sum(values) / len(values)

    def __call__(self, log):
        return super().__call__(log) | {"notes": "one key more"}

@mistake("autopsy", "the first one to complain waited for another: find the rank whose last call is an earlier one", points=2.6)
class FirstError(Autopsy):
    def culprit(self, log, ranks):
        error = next(entry for entry in log if entry.kind == "error")
        return error.rank, error.value.partition(" in ")[2]

@mistake(
    "autopsy",
    "the others wait in that call; the rank that stopped never came to it, and its last call is an earlier one",
    points=2.6,
)
class CallOfTheOthers(Autopsy):
    def culprit(self, log, ranks):
        return super().culprit(log, ranks)[0], next(entry for entry in log if entry.kind == "error").value.partition(" in ")[2]

slip("autopsy", "Fastest", 3, "the fastest step is not the usual one: the median of the times between the steps' ends is",
    Autopsy, step=lambda self, times: min(times[step] - times[step - 1] for step in times if step > 1))
slip("autopsy", "Longest", 3.4, "one long step is a hiccup: the slow rank is slow in every step. Compare means or medians",
    Autopsy, typical=lambda self, values: max(values))
slip("autopsy", "LastStep", 3.4, "a hiccup can hit any one step, also the last: compare means or medians over all steps",
    Autopsy, typical=lambda self, values: values[-1])
slip("autopsy", "FirstStep", 3.4, "the first step has a hiccup, too: compare means or medians over all steps", Autopsy,
    typical=lambda self, values: values[0])
slip("autopsy", "Newest", 2, "the newest checkpoint lacks a rank's file: count the ranks that have saved it", Autopsy,
    is_whole=lambda self, own, ranks: True)
slip("autopsy", "CountsFiles", 2, "one file of that checkpoint is shorter than the others: it's torn", Autopsy,
    is_whole=lambda self, own, ranks: len(own) == len(ranks))
slip("autopsy", "CountsTheBrokenStep", 3,
    "the step that broke was never finished, so nobody has to repeat it: the last one that ended counts", Autopsy,
    last=lambda self, log: max(entry.step for entry in log))
slip("autopsy", "StopsTheClock", 3,
    "the job held its GPUs until the last line of the log: ten minutes of waiting for a timeout count, too", Autopsy,
    seconds=lambda self, log, times: max(times.values()))

@mistake("autopsy", "steps that have to be repeated aren't kept: goodput counts those up to the checkpoint", points=3)
class KeepsAll(Autopsy):
    def __call__(self, log):
        found, times = super().__call__(log), self.ends(log)
        return found | {"goodput": len(times) * self.step(times) / log[-1].seconds}

slip("autopsy", "MeanStep", 3, "that's the mean over all steps, saves and a hiccup included: a usual step is the median",
    Autopsy, step=lambda self, times: (max(times.values()) - min(times.values())) / (len(times) - 1))
