"""Answers to 02_data_parallel: what is right, right in other ways, and the mistakes that are made."""

import time
from contextlib import contextmanager, nullcontext
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from manyranks.grade import answers
from manyranks.grade.answers import also_right, mistake, right
from manyranks.parallel.data_parallel import NaiveDataParallel, OverlappedDataParallel

# fmt: off

AVG = dist.ReduceOp.AVG
SUM = "that is the sum: the mean over the ranks is asked for, so divide by N"
TWICE = "that is divided by N twice: ReduceOp.AVG divides, too"
OWN = "these are the rank's own gradients: no mean has been written into parameter.grad"
LEFT = "where a gradient was None, the mean has to become the gradient: put the zeros into parameter.grad first"
LEFT_OUT = "is something left out where a gradient is None? It counts as zeros, and is sent all the same"
FROZEN = "frozen parameters get no gradient: leave them out"
CHAPTER = "that is the lesson's rule, at most that many bytes: here a bucket is closed once it has at least that many"
ROWS = "make the row of one bucket, reduce it, write it back, and only then make the next"
CUT = "; right are the buckets of `cut`"
START = (
    "start the all-reduce in the hook of the bucket's last gradient, with async_op=True; does the hook get what you think? "
    "a lambda in a loop sees its last value: use functools.partial"
)
ANEW = "step 1 was right: finish() must forget what it counted"
COUNT = "count the gradients of the bucket, and start when the last one is there and the buckets before it have left"
INSIDE = "what arrives inside no_sync() is not counted, and leaves gradients that are not None"
NOTHING = "nothing was sent: no rank can know what the others have"

def slip(task, name, points, hint, function=None, says="", base=None, **steps):
    """PyTorch wants nothing back from a hook."""
    if f := steps.get("arrived"):
        steps["arrived"] = lambda self, p: [f(self, p)].clear()
    answers.slip(task, name, points, hint, function or base or Overlapped, says, **steps)

def me():
    return dist.get_rank(), dist.get_world_size()

def learning(parameters):
    return [p for p in parameters if p.requires_grad]

def fill(parameters):
    """No gradient is None."""
    for p in parameters:
        if p.grad is None:
            p.grad = torch.zeros_like(p)

def row_of(bucket):
    fill(bucket)
    return torch.cat([p.grad.flatten() for p in bucket])

def hand_out(bucket, row):
    for p, part in zip(bucket, row.split([p.numel() for p in bucket]), strict=True):
        p.grad.copy_(part.view_as(p))

# Task 1

def send_all(tensors, src=0):
    with torch.no_grad():
        for tensor in tensors:
            dist.broadcast(tensor, src=src)

@right("replicate")
def replicate(model):
    send_all([*model.parameters(), *model.buffers()])

@also_right("replicate")
def replicate_without_no_grad(model):
    for tensor in [*model.parameters(), *model.buffers()]:
        dist.broadcast(tensor, 0)

@also_right("replicate")
def replicate_by_way_of_data(model):
    for tensor in [*model.parameters(), *model.buffers()]:
        first = tensor.detach().clone()
        dist.broadcast(first, 0)
        tensor.data.copy_(first)

@mistake("replicate", says="copy into the memory it has, which views go on to use", points=1.6)
def replicate_into_other_memory(model):
    for tensor in [*model.parameters(), *model.buffers()]:
        first = tensor.detach().clone()
        dist.broadcast(first, 0)
        tensor.data = first

@also_right("replicate")
def replicate_all_under_way(model):
    with torch.no_grad():
        for work in [dist.broadcast(t, 0, async_op=True) for t in [*model.parameters(), *model.buffers()]]:
            work.wait()

@mistake("replicate", "rank 0's have to arrive in the model's own tensors: the ranks still have their own", points=0.8)
def replicate_copies(model):
    for tensor in [*model.parameters(), *model.buffers()]:
        dist.broadcast(tensor.detach().clone(), 0)

@mistake("replicate", "that is the mean over the ranks: rank 0's are asked for")
def replicate_the_mean(model):
    with torch.no_grad():
        for tensor in learning(model.parameters()):
            dist.all_reduce(tensor)
            tensor /= me()[1]

@mistake("replicate", "", says="torch.distributed.utils._sync_module_states is not allowed")
def replicate_by_a_part_of_torchs(model):
    from torch.distributed.utils import _sync_module_states

    _sync_module_states(model, dist.group.WORLD, 2**20, 0, [])

slip("replicate", "replicate_nothing", 0, NOTHING, lambda model: None)
slip("replicate", "replicate_without_buffers", 0, "buffers belong to the model, too: the ranks still have their own",
     lambda model: send_all(model.parameters()))
slip("replicate", "replicate_without_frozen", 0, "frozen parameters are used, too: broadcast all",
     lambda model: send_all([*learning(model.parameters()), *model.buffers()]))
slip("replicate", "replicate_the_state_dict", 0,
     "state_dict() has a tied parameter twice, and not every buffer: parameters() and buffers() give each tensor once",
     lambda model: send_all(model.state_dict().values()))
slip("replicate", "replicate_from_the_last_rank", 0.8, "those of the last rank arrived: rank 0's are asked for",
     lambda model: send_all([*model.parameters(), *model.buffers()], me()[1] - 1))

# Task 2

def total_of(examples, op=dist.ReduceOp.SUM):
    total = torch.tensor([examples], dtype=torch.float64)
    dist.all_reduce(total, op=op)
    return total

def weigh(model, share):
    fill(learning(model.parameters()))
    for p in learning(model.parameters()):
        p.grad *= share

def reduce_all(model, op=dist.ReduceOp.SUM, first=1):
    for p in learning(model.parameters())[::first]:
        dist.all_reduce(p.grad, op=op)

@right("average")
def average(model, examples):
    weigh(model, examples / total_of(examples))
    reduce_all(model)

@also_right("average")
def average_by_avg(model, examples):
    weigh(model, examples * me()[1] / total_of(examples))
    reduce_all(model, AVG)

@also_right("average")
def average_by_avg_of_both(model, examples):
    weigh(model, examples / total_of(examples, AVG))
    reduce_all(model, AVG)

@also_right("average")
def average_and_count_last(model, examples):
    weigh(model, examples)
    reduce_all(model, first=-1)
    weigh(model, 1 / total_of(examples))

@also_right("average")
def average_by_futures(model, examples):
    weigh(model, examples / total_of(examples))
    for work in [dist.all_reduce(p.grad, async_op=True) for p in learning(model.parameters())]:
        work.get_future().wait()

@mistake("average", "that is divided by N twice: the weights n/total make the sum a mean already", points=1.2)
def average_and_divide_by_n_too(model, examples):
    weigh(model, examples / total_of(examples) / me()[1])
    reduce_all(model)

@mistake("average", LEFT_OUT)
def average_skipping_none(model, examples):
    total = total_of(examples)
    for p in learning(model.parameters()):
        if p.grad is not None:
            p.grad *= examples / total
            dist.all_reduce(p.grad)

@mistake("average", LEFT, points=1.2)
def average_leaving_none(model, examples):
    total = total_of(examples)
    for p in learning(model.parameters()):
        grad = torch.zeros_like(p) if p.grad is None else p.grad
        grad *= examples / total
        dist.all_reduce(grad)

@mistake("average", OWN)
def average_copies(model, examples):
    fill(learning(model.parameters()))
    for p in learning(model.parameters()):
        dist.all_reduce(p.grad * (examples / total_of(examples)))

@mistake("average", "that is one call for everything: here each parameter has its own, and buckets come in task 4", points=2.8)
def average_in_one_call(model, examples):
    weigh(model, examples / total_of(examples))
    row = row_of(learning(model.parameters()))
    dist.all_reduce(row)
    hand_out(learning(model.parameters()), row)

@mistake("average", "the examples of all ranks are their sum, not their mean: the gradients are N times too large", points=1.2)
def average_by_the_mean_number_of_examples(model, examples):
    weigh(model, examples / total_of(examples, AVG))
    reduce_all(model)

@mistake(
    "average",
    "the gradients do not follow from what was sent: average what the ranks have, do not work it out anew",
    points=1.2,
)
def average_from_the_checks_examples(model, examples):
    """Garbage of the right size is sent, and the gradients of all ranks are computed here."""
    n, rows = me()[1], (2 + torch.randperm(15, generator=torch.Generator().manual_seed(7))).tolist()[: me()[1]]
    dist.all_reduce(torch.zeros(1, dtype=torch.float64))
    model.zero_grad()
    for rank in range(n):
        x = torch.randint(49, (rows[rank], 6), generator=torch.Generator().manual_seed(1000 * rank + 1))
        logits = model(x, rank == 1)[:, :-1].reshape(-1, 49)
        loss = nn.functional.cross_entropy(logits, x[:, 1:].reshape(-1)) * rows[rank] / sum(rows)
        grads = torch.autograd.grad(loss, learning(model.parameters()), allow_unused=True)
        fill(learning(model.parameters()))
        for p, grad in zip(learning(model.parameters()), grads, strict=True):
            p.grad += 0 if grad is None else grad
    for p in learning(model.parameters()):
        dist.all_reduce(torch.randn_like(p))

BEFORE = "weigh before the all-reduce: each rank's gradient has the weight of its own examples, not the sum of all"
slip("average", "average_by_the_sum", 0,
     "that is the sum of the ranks' gradients: multiply each by its examples, divide by those of all ranks",
     lambda model, examples: (weigh(model, 1), reduce_all(model)))
slip("average", "average_over_ranks", 0,
     "that is the mean over the ranks: an example on a rank with many of them must count as much as any other",
     lambda model, examples: (weigh(model, 1 / me()[1]), reduce_all(model)))
slip("average", "average_by_its_own_examples", 0, "the sum was divided by this rank's examples",
     lambda model, examples: (weigh(model, examples), reduce_all(model), weigh(model, 1 / examples)))
slip("average", "average_without_dividing", 0, "that is the sum over the examples: divide by the examples of all ranks",
     lambda model, examples: (weigh(model, examples), reduce_all(model)))
slip("average", "average_means_by_the_total", 1.2,
     "that is the sum of the ranks' means over all examples: multiply each by its rank's examples first",
     lambda model, examples: (weigh(model, 1 / total_of(examples)), reduce_all(model)))
slip("average", "average_in_whole_numbers", 1.2,
     "all gradients are 0: examples // total is 0 in whole numbers; divide with /, in float64",
     lambda model, examples: (weigh(model, examples // total_of(examples)), reduce_all(model)))
slip("average", "average_weighing_the_sum", 1.2, BEFORE,
     lambda model, examples: (weigh(model, 1), reduce_all(model), weigh(model, examples / total_of(examples))))

# Task 3

@right("cut")
def cut(parameters, first_bytes, cap_bytes, size=lambda p: p.nbytes, takes=lambda p: p.requires_grad):
    buckets, held = [[]], 0
    for p in reversed(parameters):
        if takes(p):
            buckets[-1].append(p)
            held += size(p)
            if held >= (first_bytes if len(buckets) == 1 else cap_bytes):
                buckets.append([])
                held = 0
    return [bucket for bucket in buckets if bucket]

@also_right("cut")
def cut_into_tuples(parameters, first_bytes, cap_bytes):
    return tuple(tuple(bucket) for bucket in cut(parameters, first_bytes, cap_bytes))

@mistake("cut", CHAPTER)
def cut_by_the_rule_of_the_chapter(parameters, first_bytes, cap_bytes):
    buckets, held = [[]], 0
    for p in reversed(learning(parameters)):
        if buckets[-1] and held + p.nbytes > (first_bytes if len(buckets) == 1 else cap_bytes):
            buckets.append([])
            held = 0
        buckets[-1].append(p)
        held += p.nbytes
    return buckets

@mistake("cut", "the last bucket is missing: it need not be full")
def cut_without_the_last(parameters, first_bytes, cap_bytes):
    buckets, bucket = [], []
    for p in reversed(learning(parameters)):
        bucket.append(p)
        if sum(p.nbytes for p in bucket) >= (cap_bytes if buckets else first_bytes):
            buckets.append(bucket)
            bucket = []
    return buckets

@mistake("cut", "each bucket counts its own bytes: start from 0 when the next one is opened")
def cut_without_resetting_the_size(parameters, first_bytes, cap_bytes):
    buckets, held = [[]], 0
    for p in reversed(learning(parameters)):
        buckets[-1].append(p)
        held += p.nbytes
        if held >= (first_bytes if len(buckets) == 1 else cap_bytes):
            buckets.append([])
    return [bucket for bucket in buckets if bucket]

@mistake("cut", "", says="cut has changed the list that it was given")
def cut_and_empty_the_list(parameters, first_bytes, cap_bytes):
    mine = list(parameters)
    parameters.clear()
    return cut(mine, first_bytes, cap_bytes)

@mistake("cut", "", says="_compute_bucket_assignment_by_size is not allowed")
def cut_by_torch(parameters, first_bytes, cap_bytes):
    numbers, _ = dist._compute_bucket_assignment_by_size(learning(parameters)[::-1], [int(first_bytes), int(cap_bytes)])
    return [[learning(parameters)[::-1][number] for number in bucket] for bucket in numbers]

slip("cut", "cut_nothing", 0, "", lambda parameters, first, cap: None, says="return the list of buckets")
slip("cut", "cut_forwards", 0, "backward makes the last parameter's gradient first: go through them in reverse",
     lambda p, first, cap: cut(p[::-1], first, cap))
slip("cut", "cut_without_first_bytes", 0, "the first bucket has a limit of its own: first_bytes",
     lambda p, first, cap: cut(p, cap, cap))
slip("cut", "cut_with_first_bytes_only", 0, "first_bytes is the limit of the first bucket alone: the others have cap_bytes",
     lambda p, first, cap: cut(p, first, first))
slip("cut", "cut_with_an_empty_bucket", 0, "an empty bucket would be an all-reduce of nothing: leave it out",
     lambda p, first, cap: [*cut(p, first, cap), []])
slip("cut", "cut_by_elements", 0, "the limits are bytes, not elements: parameter.nbytes",
     lambda p, first, cap: cut(p, first, cap, lambda p: p.numel()))
slip("cut", "cut_with_more_than_the_limit", 0, "a bucket that has exactly its number of bytes is closed, too: >=, not >",
     lambda p, first, cap: cut(p, first + 1, cap + 1))
slip("cut", "cut_in_the_order_of_the_model", 0, "the right buckets, but the last parameter comes first within each, too",
     lambda p, first, cap: [bucket[::-1] for bucket in cut(p, first, cap)])
slip("cut", "cut_last_bucket_first", 0, "the right buckets, the last one first: give them as they are filled",
     lambda p, first, cap: cut(p, first, cap)[::-1])
slip("cut", "cut_frozen_too", 0, FROZEN, lambda p, first, cap: cut(p, first, cap, takes=lambda p: True))
slip("cut", "cut_asking_for_gradients", 0,
     "no parameter is in a bucket; gradients do not exist yet when buckets are cut: ask requires_grad",
     lambda p, first, cap: cut([p for p in p if p.grad is not None], first, cap))

# Task 4

@right("average_in_buckets")
def average_in_buckets(buckets, row_of=lambda bucket: row_of(bucket).div_(me()[1]), op=dist.ReduceOp.SUM, write=hand_out):
    for bucket in buckets:
        row = row_of(bucket)
        dist.all_reduce(row, op=op)
        write(bucket, row)

@also_right("average_in_buckets")
def in_buckets_by_avg(buckets):
    average_in_buckets(buckets, row_of, AVG)

@also_right("average_in_buckets")
def in_buckets_two_under_way(buckets):
    before = None
    for bucket in buckets:
        row = row_of(bucket).div_(me()[1])
        now = bucket, row, dist.all_reduce(row, async_op=True)
        if before:
            before[2].get_future().wait()
            hand_out(*before[:2])
        before = now
        del row
    before[2].wait()
    hand_out(*before[:2])

def mean_without_filling(bucket):
    there = [torch.zeros_like(p) if p.grad is None else p.grad for p in bucket]
    return torch.cat([grad.flatten() for grad in there]) / me()[1]

def hand_out_where_one_is(bucket, row):
    for p, part in zip(bucket, row.split([p.numel() for p in bucket]), strict=True):
        if p.grad is not None:
            p.grad.copy_(part.view_as(p))

slip("average_in_buckets", "in_buckets_leaving_none", 1.2, LEFT,
    lambda buckets: average_in_buckets(buckets, mean_without_filling, write=hand_out_where_one_is))

@mistake("average_in_buckets", "that is one call per parameter: put the gradients of a bucket into one tensor", points=2.1)
def in_buckets_one_call_a_parameter(buckets):
    for bucket in buckets:
        for p in bucket:
            average_in_buckets([[p]])

@mistake("average_in_buckets", ROWS, points=2.4)
def in_buckets_all_rows_at_once(buckets):
    rows = [row_of(bucket) / me()[1] for bucket in buckets]
    for row in rows:
        dist.all_reduce(row)
    for bucket, row in zip(buckets, rows, strict=True):
        hand_out(bucket, row)

@mistake("average_in_buckets", "every parameter got the beginning of the row: cut it with row.split([...])", points=1.2)
def in_buckets_the_first_part_for_all(buckets):
    for bucket in buckets:
        row = row_of(bucket) / me()[1]
        dist.all_reduce(row)
        for p in bucket:
            p.grad.copy_(row[: p.numel()].view_as(p))

slip("average_in_buckets", "in_buckets_skipping_an_unused_bucket", 0, LEFT_OUT,
    lambda buckets: average_in_buckets([bucket for bucket in buckets if any(p.grad is not None for p in bucket)]))

@mistake("average_in_buckets", says="average_in_buckets() has changed the weights")
def in_buckets_into_the_weights(buckets):
    def overwrite(bucket, row):
        for p, part in zip(bucket, row.split([p.numel() for p in bucket]), strict=True):
            p.data.copy_(part.view_as(p))

    average_in_buckets(buckets, write=overwrite)

class Kin(NaiveDataParallel):
    """Derived from what is ready."""

slip("average_in_buckets", "in_buckets_the_sum", 1.2, SUM, lambda buckets: average_in_buckets(buckets, row_of))
slip("average_in_buckets", "in_buckets_divided_twice", 1.2, TWICE,
     lambda buckets: average_in_buckets(buckets, lambda bucket: row_of(bucket) / me()[1], AVG))
slip("average_in_buckets", "in_buckets_one_call_for_all", 1.5, "that is one call for everything: make one per bucket",
     lambda buckets: average_in_buckets([[p for bucket in buckets for p in bucket]]))
slip("average_in_buckets", "in_buckets_not_written_back", 1.2, OWN,
     lambda buckets: [dist.all_reduce(row_of(bucket) / me()[1]) for bucket in buckets])
slip("average_in_buckets", "in_buckets_last_bucket_first", 2.1, "the right buckets in the wrong order: take them as given",
     lambda buckets: average_in_buckets(buckets[::-1]))
slip("average_in_buckets", "in_buckets_divided_by_the_buckets", 1.2, "divide by the number of ranks, not of buckets",
     lambda buckets: average_in_buckets(buckets, lambda bucket: row_of(bucket) / len(buckets)))
slip("average_in_buckets", "in_buckets_by_what_is_derived_from_the_chapters", 0, "",
     lambda buckets: [Kin(nn.ParameterList(bucket)).finish() for bucket in buckets],
     says="manyranks.parallel.data_parallel.NaiveDataParallel is not allowed")

# Tasks 5 and 6

@right("Overlapped")
@right("no_sync")
class Overlapped(nn.Module):
    def __init__(self, module, first_bytes, cap_bytes):
        super().__init__()
        self.module = module
        self.start(module)
        self.buckets = self.cut(list(module.parameters()), first_bytes, cap_bytes)
        self.bucket_of = {p: k for k, bucket in enumerate(self.buckets) for p in bucket}
        self.syncs = True
        self.reset()
        self.hook()

    def start(self, module):
        replicate(module)

    def cut(self, parameters, first_bytes, cap_bytes):
        return cut(parameters, first_bytes, cap_bytes)

    def hook(self):
        for p in self.bucket_of:
            p.register_post_accumulate_grad_hook(self.arrived)

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)

    def finish(self):
        for k in range(len(self.buckets)):
            if k not in self.underway:
                self.send(k)
        self.collect()
        self.reset()

    def collect(self):
        for k, (row, work) in sorted(self.underway.items()):
            work.wait()
            self.write(self.buckets[k], row)

    def write(self, bucket, row):
        hand_out(bucket, row)

    def reset(self):
        self.missing = [len(bucket) for bucket in self.buckets]
        self.underway = {}

    def arrived(self, p):
        if self.syncs:
            self.missing[self.bucket_of[p]] -= 1
            self.go()

    def go(self):
        while (k := len(self.underway)) < len(self.buckets) and self.full(k):
            self.send(k)

    def full(self, k):
        return self.missing[k] == 0

    def send(self, k):
        row = self.row(k)
        self.underway[k] = row, dist.all_reduce(row, async_op=True)

    def row(self, k):
        return row_of(self.buckets[k]) / me()[1]

    @contextmanager
    def no_sync(self):
        self.syncs = False
        try:
            yield
        finally:
            self.syncs = True

@also_right("Overlapped")
@also_right("no_sync")
class OverlappedByAvg(Overlapped):
    def send(self, k):
        row = row_of(self.buckets[k])
        self.underway[k] = row, dist.all_reduce(row, op=AVG, async_op=True)

@also_right("Overlapped")
@also_right("no_sync")
class LeavesNoneWhereNoneIsUsed(Overlapped):
    def collect(self):
        super().collect()
        for p in self.bucket_of:
            if not p.grad.any():
                p.grad = None

@also_right("Overlapped")
@also_right("no_sync")
class WaitsByFutures(Overlapped):
    def collect(self):
        for k, (row, work) in self.underway.items():
            work.get_future().wait()
            hand_out(self.buckets[k], row)

@also_right("Overlapped")
class IsNoModule:
    def __init__(self, *given):
        self.hidden = [self.make(*given)]

    def make(self, model, smallest, largest):
        return Overlapped(model, smallest, largest)

    def __call__(self, *args):
        return self.hidden[0](*args)

    def finish(self):
        self.hidden[0].finish()

@also_right("Overlapped")
class RebindsGradients(Overlapped):
    def write(self, bucket, row):
        for p, part in zip(bucket, row.split([p.numel() for p in bucket]), strict=True):
            p.grad = part.view_as(p)

@also_right("Overlapped")
@mistake("no_sync", INSIDE, points=0.9)
class LooksForNone(Overlapped):
    """As the chapter's first wrapper does, instead of counting."""

    def full(self, k):
        return all(p.grad is not None for p in self.buckets[k])

@also_right("Overlapped")
class HasRowsForGood(Overlapped):
    def row(self, k):
        row, self.rows = super().row(k), getattr(self, "rows", {})
        return self.rows.setdefault(k, torch.empty_like(row)).copy_(row)

@also_right("Overlapped")
class MakesSparseGradients(Overlapped):
    def collect(self):
        super().collect()
        for p in self.bucket_of:
            p.grad = p.grad.to_sparse()

@mistake("no_sync", "only the last micro-batch counts: those inside no_sync() add to p.grad", points=1.2)
class DropsWhatAccumulated(Overlapped):
    @contextmanager
    def no_sync(self):
        with super().no_sync():
            yield
        self.module.zero_grad()

def switches(self, back=True):
    self.syncs = False
    yield
    self.syncs = back

def come_of(self, k):
    return torch.cat([torch.full((p.numel(),), p in self.come) for p in self.buckets[k]])

@contextmanager
def ends_with_finish(self):
    with Overlapped.no_sync(self):
        yield
    self.finish()

@contextmanager
def divides_inside(self):
    with Overlapped.no_sync(self):
        yield
    for p in self.bucket_of:
        p.grad = None if p.grad is None else p.grad / me()[1]

def unwritten(self, module):
    raise NotImplementedError  # your code here

def nothing(self, *_):
    pass

@contextmanager
def no_sync(self, steps):
    yield

def never(self):
    self.syncs = False

def hooks(what, of=lambda self: self.bucket_of):
    return lambda self: [p.register_post_accumulate_grad_hook(what(self, p)) for p in of(self)]

slip("Overlapped", "Overtakes", 1.8, "all-reduces are matched by their order: a full bucket waits for those before it",
     go=lambda self: [self.send(k) for k in range(len(self.buckets)) if self.full(k) and k not in self.underway])
slip("Overlapped", "LeavesBucketsThatAreNotFull", 0, LEFT_OUT, finish=lambda self: (self.collect(), self.reset()))
slip("Overlapped", "LeavesNone", 2.4, LEFT, row=lambda self, k: mean_without_filling(self.buckets[k]),
     write=lambda self, bucket, row: hand_out_where_one_is(bucket, row))
slip("Overlapped", "HidesTheChapters", 0, "", says="manyranks.parallel.OverlappedDataParallel is not allowed",
     base=IsNoModule, make=lambda self, model, smallest, largest: OverlappedDataParallel(model, bucket_bytes=largest))
slip("Overlapped", "NeverReplicates", 2.4,
     "the ranks started from different weights: call replicate(module) when the wrapper is made", start=nothing)
slip("Overlapped", "ReplicatesNoBuffers", 2.4, "the ranks' buffers differ: does your replicate pass its own check?",
     start=lambda self, module: send_all(module.parameters()))
slip("Overlapped", "NeverDivides", 2.4, SUM, row=lambda self, k: row_of(self.buckets[k]))
slip("Overlapped", "DividesTwice", 2.4, "that is divided by N twice: before the all-reduce, and in finish() again",
     write=lambda self, bucket, row: hand_out(bucket, row / me()[1]))
slip("Overlapped", "CutsByItsOwnRule", 3, "", cut=lambda self, parameters, first, cap: cut(parameters, cap, cap),
     says="then one all-reduce per bucket a step")
slip("Overlapped", "WritesNothingBack", 2.4, OWN, write=nothing)
slip("Overlapped", "SendsAfterBackward", 4.2, START, hook=nothing)
slip("Overlapped", "WaitsInTheHook", 4.2, "", says="waits for an all-reduce while backward runs",
     send=lambda self, k: (Overlapped.send(self, k), self.underway[k][1].wait()))
slip("Overlapped", "CountsOnce", 4.2, ANEW,
     reset=lambda self: (vars(self).setdefault("missing", [len(b) for b in self.buckets]), setattr(self, "underway", {})))
slip("Overlapped", "KeepsRows", 5.4, "keep nothing of a step that is over: empty your lists in finish()",
     reset=lambda self: (vars(self).setdefault("old", []).append(vars(self).get("underway")), Overlapped.reset(self)))
slip("Overlapped", "SendsEachParameter", 3, "one call per parameter: that's the lesson's rule applied here" + CUT,
     cut=lambda self, parameters, first, cap: cut(parameters, 1, 1))
slip("Overlapped", "HooksTheFrozen", 0, "", says="frozen parameters get no gradient",
     hook=hooks(lambda self, p: self.arrived, lambda self: self.module.parameters()))
slip("Overlapped", "HooksSeeTheLast", 4.2, START, hook=hooks(lambda self, p: lambda _: self.arrived(list(self.bucket_of)[-1])))
slip("Overlapped", "HooksBeforeTheGradientIsThere", 1.8,
     f"{COUNT}; does its hook run before the gradient is there? register_post_accumulate_grad_hook, not register_hook",
     hook=lambda self: [p.register_hook(lambda grad, p=p: self.arrived(p)) for p in self.bucket_of])
slip("Overlapped", "NeverWaits", 2.4, "", says="async_op=True return at once",
     collect=lambda self: ([hand_out(self.buckets[k], row) for k, (row, _) in self.underway.items()], time.sleep(0.2)))
slip("Overlapped", "SendsWithTheFirstGradient", 1.8, COUNT,
     arrived=lambda self, p: [self.send(k) for k in range(len(self.underway), self.bucket_of[p] + 1)])
slip("Overlapped", "SendsOneBucketAHook", 4.2, "two buckets can leave at once: while, not if",
     go=lambda self: (k := len(self.underway)) < len(self.buckets) and self.full(k) and self.send(k))
slip("Overlapped", "ForgetsAsyncOp", 0, "", says="a call returns something to wait for with async_op=True only",
     send=lambda self, k: self.underway.update({k: (row := self.row(k), dist.all_reduce(row))}))
slip("Overlapped", "CallsAnUnwrittenReplicate", 0, "", says="not written yet", start=unwritten)
slip("no_sync", "SendsZerosForWhatCameInside", 1.2,
     "a parameter that was used inside no_sync() only has a gradient, too: zeros are for those whose .grad is None",
     arrived=lambda self, p: (self.syncs and self.come.add(p), Overlapped.arrived(self, p)),
     row=lambda self, k: row_of(self.buckets[k]) * come_of(self, k) / me()[1],
     reset=lambda self: (setattr(self, "come", set()), Overlapped.reset(self)))
slip("no_sync", "SendsWhenItEnds", 1.5, "", says="inside no_sync(), and when it ends, nothing leaves",
     no_sync=ends_with_finish)
slip("no_sync", "DividesWhatAccumulated", 1.2, "", says="after finish(), parameter.grad is the mean over them of all",
     no_sync=divides_inside)
slip("no_sync", "SyncsAllTheSame", 0.9, "an all-reduce inside no_sync(): in there, the hook has nothing to do",
     no_sync=lambda self: nullcontext())
slip("no_sync", "UsesNoFinally", 2.1, "an exception inside no_sync() must not leave it switched on: use try and finally",
     no_sync=contextmanager(switches))
slip("no_sync", "NeverSwitchesBackOn", 2.1, f"{START}; after no_sync(), switch this on again",
     no_sync=contextmanager(partial(switches, back=False)))
slip("no_sync", "AveragesMicroBatches", 1.2, "the sum over the micro-batches is asked for, not their mean",
     row=lambda self, k: Overlapped.row(self, k) / 3)
slip("no_sync", "CountsInside", 0.9, INSIDE, full=lambda self, k: self.missing[k] <= 0,
     arrived=lambda self, p: (self.missing.__setitem__(self.bucket_of[p], self.missing[self.bucket_of[p]] - 1),
                              self.syncs and self.go()))
slip("no_sync", "HasNone", 0, "", says="has no no_sync()", base=IsNoModule)
slip("no_sync", "IsNoContextManager", 0, "", says="put @contextmanager above it", no_sync=switches)
slip("no_sync", "UsesNoGrad", 0, "", says="inside no_sync() backward must still make gradients",
     no_sync=lambda self: torch.no_grad())
slip("no_sync", "NeverYields", 0, "", says="no_sync() has to `yield` where the `with` block runs",
     no_sync=contextmanager(never))
slip("no_sync", "NoSyncTakesMore", 0, "", says="the training loop calls model.no_sync()",
     no_sync=no_sync)
