"""Answers to 03_zero: what is right, and the mistakes that are made. Most change one step of the right answer."""

import math
from types import FunctionType

import torch
import torch.distributed as dist

from manyranks.grade.answers import also_right, mistake, right, slip

# fmt: off

def me():
    return dist.get_rank(), dist.get_world_size()

def pad(tensor, front=0):
    return torch.nn.functional.pad(tensor.flatten(), (front, -(tensor.numel() + front) % me()[1]))

def reduced(whole, **how):
    """This rank's shard of the sum."""
    mine = whole.new_empty(len(whole) // me()[1])
    dist.reduce_scatter_single(mine, whole, **how)
    return mine

def all_reduced(row):
    dist.all_reduce(row)
    return row

def filled(parameter):
    return torch.zeros(parameter.shape, dtype=parameter.dtype) if parameter.grad is None else parameter.grad

def add(shard_S, mean_S):
    shard_S.grad = mean_S if shard_S.grad is None else shard_S.grad + mean_S

SUM = "that is the sum over the ranks: their mean is asked for, so divide by N"
OWN = "these are the rank's own gradients: reduce-scatter them, and give the shard the mean of its part"
LATE = "the parameters are one step behind: gather after the optimizer's step, from the shards as they are then"
NONE = "a parameter that a rank's examples do not use has a gradient of None there: zeros take its place, and are sent"
WAIT = "and call .wait() on it"
CLEAR = "the gradients of the step before are still there, and backward adds to them: zero_grad() sets parameter.grad to None"
NUMPY = "a copy takes its memory in any form, also as an array of numpy's, bytes, or a list of numbers: keep none"
VIEW = "a slice or a chunk is a view, and keeps the whole tensor's memory: clone() it"
YOURSELF = "write it yourself, with dist.all_gather_single and dist.reduce_scatter_single"
ALL_REDUCE = "dist.reduce_scatter_single gives each its shard"

# 1. shard

@right("shard")
def shard(tensor):
    return pad(tensor).chunk(me()[1])[me()[0]].clone()

@also_right("shard")
def shard_into_zeros(tensor):
    piece = tensor.new_zeros(-(-tensor.numel() // me()[1]))
    mine = tensor.flatten()[me()[0] * len(piece) :][: len(piece)]
    piece[: len(mine)] = mine
    return piece

def part(tensor, size):
    return tensor.flatten()[me()[0] * size :][:size].clone()

@mistake("shard", NUMPY, points=1.2)
def keeps_an_array(tensor):
    keeps_an_array.kept = tensor.numpy().copy()
    return shard(tensor)

slip("shard", "a_view", 1.2, VIEW, lambda t: pad(t).chunk(me()[1])[me()[0]])
slip("shard", "no_padding", 0.8, "these are pieces of different sizes, and collectives need equal ones: pad with zeros first",
     lambda t: t.flatten().tensor_split(me()[1])[me()[0]].clone())
slip("shard", "no_padding_in_the_last_chunk", 0.8, "the last rank's chunk is short: pad with zeros to a multiple of N",
     lambda t: part(t, -(-t.numel() // me()[1])))
slip("shard", "torch_chunk", 0, "", lambda chunks: list(chunks.flatten().chunk(me()[1]))[me()[0]].clone(),
     says="few elements make fewer chunks than N: pad with zeros to a multiple of N first")
slip("shard", "pads_the_front", 0.8, "the padding comes at the end: yours is at the front",
     lambda t: pad(t, -t.numel() % me()[1]).chunk(me()[1])[me()[0]].clone())
slip("shard", "the_next_ranks_chunk", 0.8, "that is another rank's chunk: rank r keeps chunk r",
     lambda t: pad(t).chunk(me()[1])[(me()[0] + 1) % me()[1]].clone())
slip("shard", "rounds_down", 0.8, "E // N leaves the last elements out: pad with zeros, so that a chunk has ceil(E / N)",
     lambda t: part(t, t.numel() // me()[1]))
slip("shard", "small_ones_only", 0.8, "", lambda t: shard(t) * (t.numel() < 1000), says="the piece of a large tensor")
slip("shard", "nothing_cut", 0.2, "that is the whole tensor: keep chunk number rank", lambda t: t.flatten().clone())
slip("shard", "nothing_at_all", 0.2, "", lambda t: torch.zeros(0), says="could not be judged")
slip("shard", "always_pads", 0.8, "too much padding: none where E is a multiple of N, -E % N in general",
     lambda t: torch.nn.functional.pad(t.flatten(), (0, me()[1] - t.numel() % me()[1])).chunk(me()[1])[me()[0]].clone())
slip("shard", "asks_the_others", 1.8, "", lambda t: rows(shard(t)).chunk(me()[1])[me()[0]].clone(),
     says="it takes its piece without asking anybody")

# 2. gather

def rows(shard_S):
    whole = shard_S.new_empty(len(shard_S) * me()[1])
    dist.all_gather_single(whole, shard_S)
    return whole

@right("gather")
def gather(shard_S, shape):
    return rows(shard_S)[: shape.numel()].view(shape)

@also_right("gather")
def gather_into_a_list(shard_S, shape):
    parts = [torch.empty_like(shard_S) for _ in range(me()[1])]
    dist.all_gather(parts, shard_S)
    return torch.cat(parts)[: math.prod(shape)].reshape(shape)

@also_right("gather")
def gather_by_the_older_name(shard_S, shape):
    whole = shard_S.new_empty(len(shard_S) * me()[1])
    dist.all_gather_into_tensor(whole, shard_S, async_op=True).wait()
    return whole[: shape.numel()].view(shape)

def alone(shard_S):
    """Zeros, but for this rank's part."""
    whole = shard_S.new_zeros(len(shard_S) * me()[1])
    whole.chunk(me()[1])[me()[0]].copy_(shard_S)
    return whole

@mistake("gather", says=WAIT)
def never_waits(shard_S, shape):
    whole = shard_S.new_empty(len(shard_S) * me()[1])
    dist.all_gather_single(whole, shard_S, async_op=True)
    return whole[: shape.numel()].view(shape)

ROOM = "the output is flat and has room for N·S, padding included"

@mistake("gather", says=ROOM)
def makes_room_of_its_shape(shard_S, shape):
    whole = shard_S.new_empty(shape)
    dist.all_gather_single(whole, shard_S)
    return whole

@mistake("gather", says="a tensor arrives in the dtype of its sender")
def makes_room_of_float32(shard_S, shape):
    whole = torch.empty(len(shard_S) * me()[1])
    dist.all_gather_single(whole, shard_S)
    return whole[: shape.numel()].view(shape)

slip("gather", "views_the_padding", 0, "", lambda shard_S, shape: rows(shard_S).view(shape),
    says="the padding is still there: keep the first shape.numel() elements")

slip("gather", "keeps_the_padding", 0.8, "the padding is still there: keep the first shape.numel() elements, then .view(shape)",
     lambda s, shape: rows(s))
slip("gather", "forgets_the_shape", 0.8, "the elements are right, the shape is not: .view(shape)",
     lambda s, shape: rows(s)[: shape.numel()])
slip("gather", "its_own_part", 0, "only this rank's own part is there: gather the others'",
     lambda s, shape: alone(s)[: shape.numel()].view(shape))
slip("gather", "by_all_reduce", 1.2, "", lambda s, shape: all_reduced(alone(s))[: shape.numel()].view(shape),
     says="dist.all_gather_single brings all shards at once")
slip("gather", "gathers_twice", 1.2, "everything was gathered twice: one all-gather per tensor",
     lambda s, shape: (gather(s, shape), gather(s, shape))[1])

# 3. Stage1

@right("Stage1")
class Stage1:
    def __init__(self, params, optimizer_class, **kwargs):
        self.params = self.learning(list(params))
        self.shards = [self.shard(p) for p in self.params]
        self.optimizer = self.make(optimizer_class, kwargs)

    def learning(self, params):
        return [p for p in params if p.requires_grad]

    def shard(self, p):
        return torch.nn.Parameter(shard(p.detach()))

    def make(self, optimizer_class, kwargs):
        return optimizer_class(self.shards, **kwargs)

    def mean(self, p):
        return reduced(pad(filled(p)) / me()[1])

    def step(self):
        self.reduce()
        self.optimizer.step()
        self.spread()

    def reduce(self):
        for p, s in zip(self.params, self.shards):
            s.grad = self.mean(p)

    @torch.no_grad()
    def spread(self):
        for p, s in zip(self.params, self.shards):
            p.copy_(self.gather(p, s))

    def gather(self, p, s):
        return gather(s.detach(), p.shape)

    def zero_grad(self):
        for p in self.forgotten():
            p.grad = None

    def forgotten(self):
        return [*self.params, *self.shards]

def knowing(f, **names):
    """The function, in which these names mean something else."""
    return FunctionType(f.__code__, {**globals(), **names}, f.__name__)

@also_right("Stage1")
class ListsAndAverages(Stage1):
    def mean(self, p):
        parts = list(pad(filled(p)).chunk(me()[1]))
        mine = torch.empty_like(parts[0])
        dist.reduce_scatter(mine, parts, op=dist.ReduceOp.AVG)
        return mine

    gather = knowing(lambda self, p, s: gather(s, tuple(p.shape)), gather=gather_into_a_list)

@also_right("Stage1")
class AssignsData(Stage1):
    """With an optimizer's own zero_grad."""

    def spread(self):
        for p, s in zip(self.params, self.shards):
            p.data = self.gather(p, s)

    def zero_grad(self):
        self.optimizer.zero_grad()
        for p in self.params:
            p.grad = None

TRIED = {"a tensor": torch.ones(500, 500), "an array": torch.ones(500, 500).numpy(), "a list": [0.5 * k for k in range(20_000)]}

@also_right("Stage1")
class HasVariablesOfAnotherCell(Stage1):
    """They aren't this optimizer's: the judge that counts has all that a notebook's cells have made."""

    def step(self):
        super().step()
        assert len(TRIED) == 3

@mistake("Stage1", "nothing was sent, and nothing changed: was params a generator that was empty the second time? list(params)")
class GoesThroughParamsTwice(Stage1):
    def __init__(self, params, optimizer_class, **kwargs):
        self.shards = [self.shard(p) for p in params if p.requires_grad]
        self.params = list(params)
        self.optimizer = optimizer_class(self.shards, **kwargs)

@mistake("Stage1", "one row for all is the chapter's: here each parameter has a reduce-scatter of its own, padded", points=4.35)
class SendsAllInOneRow(Stage1):
    def reduce(self):
        whole = torch.cat([torch.cat(parts) for parts in zip(*[pad(filled(p)).chunk(me()[1]) for p in self.params])])
        for s, grad in zip(self.shards, reduced(whole / me()[1]).split([len(s) for s in self.shards])):
            s.grad = grad.clone()

slip("Stage1", "CallsAWrongShard", 0, "", says="your shard does not pass its own check: mend it first",
     shard=knowing(Stage1.shard, shard=globals()["rounds_down"]))
slip("Stage1", "NeverDivides", 2, SUM, mean=lambda self, p: reduced(pad(filled(p))))
slip("Stage1", "ReducesNothing", 2, OWN, mean=lambda self, p: shard(filled(p)))
slip("Stage1", "ReducesFloat32", 2, "float64 has to stay float64 on its way: these gradients are sent with half the bytes",
     mean=lambda self, p: reduced((pad(filled(p)) / me()[1]).float()).double())
slip("Stage1", "AllReducesAndCuts", 4.35, "", mean=lambda self, p: shard(all_reduced(pad(filled(p)) / me()[1])),
     says=ALL_REDUCE)
slip("Stage1", "ForgetsToGather", 2, "the parameters never change: after the optimizer's step, gather them from the shards",
     spread=lambda self: None)
slip("Stage1", "SendsForShow", 0, "", says="not judged, because the work wasn't done",
     step=lambda self: dist.all_reduce(torch.ones(1)))
slip("Stage1", "DoesNothing", 0, "", step=lambda self: None, says="not judged, because the work wasn't done")
slip("Stage1", "ForgetsNoGrad", 0, "", says="change parameters under torch.no_grad()",
     spread=lambda self: [p.copy_(self.gather(p, s)) for p, s in zip(self.params, self.shards)])
slip("Stage1", "GathersBeforeTheStep", 2, LATE, step=lambda self: (self.reduce(), self.spread(), self.optimizer.step()))
slip("Stage1", "KeepsGradientsOfShards", 1.65, "the shards' gradients are still there: zero_grad() sets them to None, too",
     forgotten=lambda self: self.params)
slip("Stage1", "OptimizesWholeParameters", 0.65,
     "the shards never change: make the optimizer of them, and give them their gradients before it steps",
     make=lambda self, optimizer_class, kwargs: optimizer_class(self.params, **kwargs))
slip("Stage1", "ClearsNothing", 0.65, CLEAR, zero_grad=lambda self: None)
slip("Stage1", "ClearsShardsOnly", 0.65, CLEAR, zero_grad=lambda self: self.optimizer.zero_grad())
slip("Stage1", "PadsNoGradient", 0, "", mean=lambda self, p: reduced(filled(p).flatten() / me()[1]),
     says="pad with zeros first: N·S elements go in, and S come out")
slip("Stage1", "TrainsTheFrozenToo", 0, "frozen parameters change: AdamW shrinks everything it has. Give them no shard",
     learning=lambda self, params: params)
slip("Stage1", "IgnoresSettings", 2, "the optimizer has settings of its own: hand **kwargs on to optimizer_class",
     make=lambda self, optimizer_class, kwargs: optimizer_class(self.shards))
slip("Stage1", "SkipsWhatHasNoGradient", 0, "", says=NONE,
     reduce=lambda self: [setattr(s, "grad", self.mean(p)) for p, s in zip(self.params, self.shards) if p.grad is not None])
slip("Stage1", "KeepsWholeGradients", 1.65, "zeros take as much memory as gradients: set parameter.grad to None",
     zero_grad=lambda self: [setattr(p, "grad", torch.zeros_like(p)) for p in self.params] and self.optimizer.zero_grad())
slip("Stage1", "KeepsWholeCopies", 1.65, "a whole copy of the parameters stays, in whatever form: keep none",
     shard=lambda self, p: self.__dict__.setdefault("copies", []).append(p.detach().clone()) or Stage1.shard(self, p))
slip("Stage1", "KeepsArrays", 1.65, NUMPY,
     shard=lambda self, p: self.__dict__.setdefault("copies", []).extend((p.detach().numpy().copy(), p.tolist()))
     or Stage1.shard(self, p))
slip("Stage1", "MakesAnOptimizerEachStep", 2, "each step begins with new optimizer states: make the optimizer once",
     make=lambda self, kind, kwargs: setattr(self, "again", lambda: kind(self.shards, **kwargs)) or self.again(),
     spread=lambda self: (Stage1.spread(self), setattr(self, "optimizer", self.again())))
slip("Stage1", "ShardsNothing", 1, "data parallelism has whole states: give the optimizer shards, and reduce-scatter gradients",
     shard=lambda self, p: p, mean=lambda self, p: all_reduced(filled(p) / me()[1]), spread=lambda self: None)

# 4. Stage2

@right("Stage2")
class Stage2(Stage1):
    def __init__(self, params, optimizer_class, **kwargs):
        super().__init__(params, optimizer_class, **kwargs)
        self.queue = self.order(list(zip(self.params, self.shards)))
        self.reset()
        self.hook()

    def order(self, pairs):
        return pairs[::-1]

    def hook(self):
        for p in self.params:
            p.register_post_accumulate_grad_hook(self.arrived)

    def reset(self):
        self.left, self.there = 0, set()

    def arrived(self, p):
        self.there.add(p)
        while self.left < len(self.queue) and self.queue[self.left][0] in self.there:
            self.send()

    def send(self):
        p, s = self.queue[self.left]
        self.take(p, s)
        self.drop(p)
        self.left += 1

    def take(self, p, s):
        add(s, self.mean(p))

    def drop(self, p):
        p.grad = None

    def finish(self):
        while self.left < len(self.queue):
            self.send()
        self.reset()

    def step(self):
        self.optimizer.step()
        self.spread()

@also_right("Stage2")
class LooksForNone(Stage2):
    """Instead of counting: what has left has no gradient."""

    def arrived(self, p):
        while self.left < len(self.queue) and self.queue[self.left][0].grad is not None:
            self.send()

@also_right("Stage2")
class AddsInPlace(Stage2):
    def make(self, optimizer_class, kwargs):
        for s in self.shards:
            s.grad = torch.zeros_like(s)
        return super().make(optimizer_class, kwargs)

    def take(self, p, s):
        s.grad = torch.zeros_like(s) if s.grad is None else s.grad
        s.grad += self.mean(p)

@mistake("Stage2", says="hint: gradients leave in the reverse order of `params`, on all ranks")
class ReducesInTheOrderOfBackward(Stage2):
    """What is there leaves; the rest in finish."""

    def arrived(self, p):
        self.queue.sort(key=lambda pair: pair[0] is not p and pair[0] not in self.there)
        self.there.add(p)
        self.send()

@mistake("Stage2", "when one leaves, the next ones may be there already: while, not if", points=1.2)
class SendsOneAHook(Stage2):
    def arrived(self, p):
        self.there.add(p)
        if self.left < len(self.queue) and self.queue[self.left][0] in self.there:
            self.send()

@mistake("Stage2", "once a gradient has left, its shard is all that a rank keeps: no list of whole ones", points=2.6)
class KeepsAllGradients(Stage2):
    def drop(self, p):
        self.kept = [*getattr(self, "kept", []), self.copy(p)]
        p.grad = None

    def copy(self, p):
        return p.grad

    def zero_grad(self):
        super().zero_grad()
        self.kept = []

@mistake("Stage2", says="which has no finish()")
class IsStage1(Stage1):
    pass

slip("Stage2", "ReducesAfterBackwardOnly", 1.2, "reduce it in the hook, register_post_accumulate_grad_hook, not after backward",
     hook=lambda self: None)
slip("Stage2", "QueuesForwards", 1.2, "gradients leave in the reverse order of `params`, on all ranks",
     order=lambda self, pairs: pairs)
slip("Stage2", "HooksSeeTheLast", 0.4,
     "does the hook get what you think? A lambda in a loop sees its last value: use functools.partial",
     hook=lambda self: [p.register_post_accumulate_grad_hook(lambda _: self.arrived(p)) for p in self.params])  # noqa: B023
slip("Stage2", "HooksBeforeItIsThere", 0.4, "register_hook runs before .grad is there: use register_post_accumulate_grad_hook",
     hook=lambda self: [p.register_hook(lambda grad, p=p: self.arrived(p)) for p in self.params])
slip("Stage2", "HooksTakeNothing", 0, "", says="PyTorch calls hook(parameter)",
     hook=lambda self: [p.register_post_accumulate_grad_hook(lambda: None) for p in self.params])
slip("Stage2", "DropsNothing", 1.6, "what has left counts again in the next backward: drop it, parameter.grad = None",
     drop=lambda self, p: None)
slip("Stage2", "Overwrites", 1.6, "only the last backward counts: add each mean to the shard's gradient",
     take=lambda self, p, s: setattr(s, "grad", self.mean(p)))
slip("Stage2", "InheritsStep", 1.4, "does step() reduce again, as in Stage1? Shards have their gradients: write one without",
     step=Stage1.step)
slip("Stage2", "CountsOnce", 0, "the first backward was right: finish() has to forget what it counted",
     finish=lambda self: [self.send() for _ in self.queue[self.left :]])
slip("Stage2", "ForgetsHalf", 0.4, "the first backward was right: finish() has to forget what was there, too",
     reset=lambda self: (setattr(self, "left", 0), vars(self).setdefault("there", set())))
slip("Stage2", "KeepsTheStepsBefore", 1.6, "the shards' gradients are still there: zero_grad() sets them to None, too",
     forgotten=lambda self: self.params)
slip("Stage2", "DropsInFinish", 2.6, "drop a gradient at once when it has left, not after backward: parameter.grad = None",
     drop=lambda self, p: None, finish=lambda self: (Stage2.finish(self), [setattr(p, "grad", None) for p in self.params]))

# 5. Unit

@right("Unit")
class Unit:
    def __init__(self, module):
        self.n, self.params = me()[1], self.parameters(module)
        self.shards = [self.shard(p) for p in self.params]
        self.works, self.is_free, self.begun = [], False, False
        self.lay()
        self.free()
        self.begun = True

    def parameters(self, module):
        return list(module.parameters())

    def shard(self, p):
        return torch.nn.Parameter(shard(p.detach()), p.requires_grad)

    def lay(self):
        self.wholes = [s.new_empty(len(s) * self.n) for s in self.shards]
        for p, whole in zip(self.params, self.wholes):
            p.data = whole[: p.numel()].view(p.shape)

    def start(self):
        if self.is_free:
            self.is_free = False
            self.issue()

    def issue(self):
        for whole, s in zip(self.wholes, self.shards):
            whole.untyped_storage().resize_(self.room(whole))
            self.works.append(self.gather(whole, s))

    def room(self, whole):
        return whole.nbytes

    def gather(self, whole, s):
        return dist.all_gather_single(whole, s.detach(), async_op=True)

    def wait(self):
        for work in self.works:
            work.wait()
        self.works.clear()

    def free(self):
        for whole in self.wholes:
            whole.untyped_storage().resize_(0)
        self.is_free = True

    def reduce(self):
        for p, s in zip(self.params, self.shards):
            if p.requires_grad:
                self.take(p, s, self.mean(p))
                self.drop(p)

    def mean(self, p):
        return reduced(pad(filled(p)) / self.n)

    def take(self, p, s, mean_S):
        add(s, mean_S)

    def drop(self, p):
        p.grad = None

@also_right("Unit")
class CopiesInWait(Unit):
    """The parameters keep storages of their own; gathers arrive elsewhere."""

    def lay(self):
        self.sizes = [p.nbytes for p in self.params]

    def issue(self):
        for s in self.shards:
            room = s.new_empty(len(s) * self.n)
            self.works.append((room, dist.all_gather_single(room, s, async_op=True)))

    def wait(self):
        for p, size, (room, work) in zip(self.params, self.sizes, self.works):
            work.wait()
            p.untyped_storage().resize_(size)
            p.data.copy_(room[: p.numel()].view(p.shape))
        self.works.clear()

    def free(self):
        for p in self.params:
            p.untyped_storage().resize_(0)
        self.is_free = True

@also_right("Unit")
class ReducesWithAvg(Unit):
    def mean(self, p):
        return reduced(pad(filled(p)), op=dist.ReduceOp.AVG)

FREE = "the memory of a parameter is parameter.untyped_storage(): free() takes it away with resize_(0)"
VERY = (
    "the shards never change: the optimizer was made of unit.shards once, so reduce() gives these very Parameters their .grad"
)

@mistake("Unit", "autograd has saved what the parameters were: take that memory away, with storage.resize_(0)", points=1.32)
class GivesOtherData(Unit):
    """parameter.data = empty: what autograd has saved stays."""

    def lay(self):
        self.shapes = [p.shape for p in self.params]

    def issue(self):
        self.wholes = [s.new_empty(len(s) * self.n) for s in self.shards]
        super().issue()

    def wait(self):
        if self.works:
            super().wait()
            for p, whole, shape in zip(self.params, self.wholes, self.shapes):
                p.data = whole[: shape.numel()].view(shape)
            self.wholes = []

    def free(self):
        for p, shape in zip(self.params, self.shapes):
            p.data = self.empty(p, shape)
        self.is_free = True

    def empty(self, p, shape):
        return torch.empty(1, dtype=p.dtype).expand(shape)

slip("Unit", "GivesEmptyData", 0, "", GivesOtherData, says="loses the shape, and frees nothing that autograd has saved",
    empty=lambda self, p, shape: torch.empty(0, dtype=p.dtype))

@mistake("Unit", "something else of yours holds whole copies: keep no tensor from start() or __init__ alive", points=1.32)
class FreeKeepsACopy(Unit):
    def free(self):
        if not self.is_free and self.begun:
            self.kept = [self.copy(whole) for whole in self.wholes]
        super().free()

    def copy(self, whole):
        return whole.clone()

@mistake("Unit", says="are not still the same Parameter objects")
class PutsNewParametersIn(Unit):
    def parameters(self, module):
        for owner in module.modules():
            for name, p in list(owner.named_parameters(recurse=False)):
                setattr(owner, name, torch.nn.Parameter(p.detach().clone(), p.requires_grad))
        return list(module.parameters())

@mistake("Unit", says=YOURSELF)
def torchs_own_unit(module):
    from torch.distributed.fsdp import fully_shard

    return fully_shard(module)

slip("Unit", "NeverFrees", 1.32, f"a unit is free at first: call self.free() at the end of __init__: {FREE}",
     free=lambda self: setattr(self, "is_free", True))
slip("Unit", "KeepsViewsAsShards", 1.32, "a view keeps the whole tensor: a shard has memory of its own, as `shard` gives it",
     shard=lambda self, p: torch.nn.Parameter(pad(p.detach()).chunk(self.n)[me()[0]], p.requires_grad))
slip("Unit", "DropsNoGradient", 0.52, "whole gradients count again in the next backward: drop them, parameter.grad = None",
     drop=lambda self, p: None)
slip("Unit", "LeavesGradientsWhereTheyAre", 1.6, VERY, take=lambda self, p, s, mean_S: None)
slip("Unit", "OverwritesIt", 1.6, "only the last backward counts: where a shard has a gradient already, add to it",
     take=lambda self, p, s, mean_S: setattr(s, "grad", mean_S))
slip("Unit", "GathersWhatItWasMadeWith", 0.52,
     "the optimizer changes unit.shards, and other tensors are gathered: start() sends the shards as they are now",
     lay=lambda self: (Unit.lay(self), setattr(self, "first", {id(s): s.detach().clone() for s in self.shards}))[0],
     gather=lambda self, whole, s: dist.all_gather_single(whole, self.first[id(s)], async_op=True))
slip("Unit", "LeavesTheFrozenOut", 1.6, "", says="start() gathers each parameter of a free unit once, frozen ones, too",
     issue=lambda self: [w.untyped_storage().resize_(w.nbytes) and s.requires_grad and self.works.append(self.gather(w, s))
                         for w, s in zip(self.wholes, self.shards)])
slip("Unit", "NeverDividesInAUnit", 1.6, SUM, mean=lambda self, p: reduced(pad(filled(p))))
slip("Unit", "GathersSynchronously", 3.68, "start() waits for nothing: async_op=True, keep what it returns, wait in wait()",
     gather=lambda self, whole, s: dist.all_gather_single(whole, s.detach()), wait=lambda self: None)
slip("Unit", "TrainsTheFrozen", 0, "", shard=lambda self, p: torch.nn.Parameter(shard(p.detach())),
     says="a shard is what shard(parameter) returns, and learns where its parameter does")
slip("Unit", "ResizesToElements", 0, "", says="storage.resize_ takes bytes, not elements",
     room=lambda self, whole: whole.numel())
slip("Unit", "GathersInWait", 3.48, "wait() never gathers: gathers are issued in start(), and only there",
     start=lambda self: None, wait=lambda self: (Unit.start(self), Unit.wait(self)))
slip("Unit", "GathersAgainWhenWhole", 3.8, "start() does nothing where the unit is whole or under way: gather once",
     start=lambda self: self.works or self.issue())
slip("Unit", "AddsToNone", 0, "", take=lambda self, p, s, mean_S: s.grad.add_(mean_S), says="a shard's .grad may be None")
slip("Unit", "KeepsGradientsOfAUnit", 1.32, "reduce() drops the whole gradients, parameter.grad = None: no list of them",
     drop=lambda self, p: setattr(self, "kept", [*getattr(self, "kept", [])[-1:], p.grad]) or Unit.drop(self, p))

# 6. Prefetch

@right("Prefetch")
class Prefetch:
    def __init__(self, units):
        self.units, self.last = units, len(units) - 1

    def gather(self, k):
        self.units[k].start()
        self.units[k].wait()

    def before_forward(self, k):
        self.gather(k)
        if k < self.last:
            self.units[k + 1].start()

    def after_forward(self, k):
        if k < self.last:
            self.units[k].free()

    def before_backward(self, k):
        self.gather(k)
        if k > 0:
            self.units[k - 1].start()

    def after_backward(self, k):
        self.units[k].reduce()
        self.units[k].free()

@also_right("Prefetch")
class StartsBeforeItWaits(Prefetch):
    def before_forward(self, k):
        for following in (k, k + 1)[: 1 + (k < self.last)]:
            self.units[following].start()
        self.units[k].wait()

    def before_backward(self, k):
        for following in (k, k - 1)[: 1 + (k > 0)]:
            self.units[following].start()
        self.units[k].wait()

    def after_backward(self, k):
        self.units[k].free()
        self.units[k].reduce()

FORWARD = "before_forward(k) starts unit k + 1, too, so that it comes while layer k computes"
BACKWARD = "in backward the next layer is k − 1: before_backward(k) starts it, so that it comes while layer k computes"
TWO = "two at a time: the one that computes and the next one; the others are freed, by after_forward(k) and after_backward(k)"
BEFORE = "old parameters compute: a unit that is still whole when the optimizer steps is not gathered again; free it before"
THERE = "a layer computed while its parameters were not there: start() and wait() for unit k before layer k computes"

@mistake("Prefetch", says="does the schedule do something on one rank only?")
class RankZeroDoesNotPrefetch(Prefetch):
    def before_backward(self, k):
        self.gather(k)
        if k > 0 and me()[0]:
            self.units[k - 1].start()

slip("Prefetch", "WhatWasGiven", 0.6, f"{FORWARD}; and the last unit stays whole between forward and backward",
     before_forward=Prefetch.gather, before_backward=Prefetch.gather,
     after_forward=lambda self, k: self.units[k].free())
slip("Prefetch", "OneAtATime", 0.99, FORWARD, before_forward=Prefetch.gather, before_backward=Prefetch.gather)
slip("Prefetch", "PrefetchesInForwardOnly", 0.99, BACKWARD, before_backward=Prefetch.gather)
slip("Prefetch", "DropsTheLast", 2.61, "the last unit stays whole between forward and backward: do not free it after forward",
     after_forward=lambda self, k: self.units[k].free())
slip("Prefetch", "NeverWaitsForAUnit", 1.2, THERE, gather=lambda self, k: self.units[k].start())
slip("Prefetch", "FreesAfterBackwardOnly", 0.6, TWO, after_forward=lambda self, k: None)
slip("Prefetch", "NeverReduces", 1.2, "nothing learns: after_backward(k) calls reduce() of unit k, for the shards' gradients",
     after_backward=lambda self, k: self.units[k].free())
slip("Prefetch", "FreesTheOneBefore", 0, "", says="gathered once in forward and once in backward",
     after_backward=lambda self, k: (self.units[k].reduce(), k and self.units[k - 1].free()))
slip("Prefetch", "WaitsForTheNext", 1.89, "wait for the next unit when its layer is next: it can come while layer k computes",
     before_forward=lambda self, k: (Prefetch.before_forward(self, k), k < self.last and self.units[k + 1].wait()))
slip("Prefetch", "StartsTheNextTooLate", 0.99, "the next unit starts when layer k has computed: start it in before_forward(k)",
     before_forward=Prefetch.gather,
     after_forward=lambda self, k: (Prefetch.after_forward(self, k), k < self.last and self.units[k + 1].start()))
slip("Prefetch", "WrapsAround", 0, "units[-1] is the last unit, which was started for nothing: ask whether k > 0",
     before_backward=lambda self, k: (self.gather(k), self.units[k - 1].start()))
slip("Prefetch", "NeverFreesAUnit", 0, f"after_forward(k) and after_backward(k) free unit k: {BEFORE}",
     after_forward=lambda self, k: None, after_backward=lambda self, k: self.units[k].reduce())
slip("Prefetch", "NeverFreesTheFirst", 1.11, BEFORE,
     after_backward=lambda self, k: (self.units[k].reduce(), k and self.units[k].free()))
