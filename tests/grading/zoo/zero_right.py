"""What the zoo of ZeRO is made of: the right answers, in parts that wrong ones leave out or replace."""

import torch
import torch.distributed as dist


def pad(tensor):
    return torch.nn.functional.pad(tensor.flatten(), (0, -tensor.numel() % dist.get_world_size()))


def shard(tensor):
    return pad(tensor).chunk(dist.get_world_size())[dist.get_rank()].clone()


def gather(shard_S, shape):
    whole = shard_S.new_empty(len(shard_S) * dist.get_world_size())
    dist.all_gather_single(whole, shard_S)
    return whole[: shape.numel()].view(shape)


def reduced(whole, **how):
    """This rank's shard of the sum."""
    mine = whole.new_empty(len(whole) // dist.get_world_size())
    dist.reduce_scatter_single(mine, whole, **how)
    return mine


def filled(parameter):
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def add(shard_S, mean_S):
    shard_S.grad = mean_S if shard_S.grad is None else shard_S.grad + mean_S


class Right1:
    """A right answer to Stage1; each wrong one changes a method."""

    def __init__(self, params, optimizer_class, **kwargs):
        self.params = self.learning(list(params))
        self.shards = [self.shard(p) for p in self.params]
        self.optimizer = self.make(optimizer_class, kwargs)

    def learning(self, params):
        return [p for p in params if p.requires_grad]

    def shard(self, parameter):
        return torch.nn.Parameter(shard(parameter.detach()))

    def make(self, optimizer_class, kwargs):
        return optimizer_class(self.shards, **kwargs)

    def mean(self, parameter):
        return reduced(pad(filled(parameter)) / dist.get_world_size())

    def step(self):
        self.reduce()
        self.optimizer.step()
        self.spread()

    def reduce(self):
        for p, s in zip(self.params, self.shards, strict=True):
            s.grad = self.mean(p)

    @torch.no_grad()
    def spread(self):
        for p, s in zip(self.params, self.shards, strict=True):
            p.copy_(self.gather(p, s))

    def gather(self, p, s):
        return gather(s.detach(), p.shape)

    def zero_grad(self):
        for p in [*self.params, *self.shards]:
            p.grad = None


class Right2(Right1):
    """A right answer to Stage2."""

    def __init__(self, params, optimizer_class, **kwargs):
        super().__init__(params, optimizer_class, **kwargs)
        self.queue = self.order(list(zip(self.params, self.shards, strict=True)))
        self.reset()
        self.hook()

    def order(self, pairs):
        return pairs[::-1]

    def hook(self):
        for parameter in self.params:
            parameter.register_post_accumulate_grad_hook(self.arrived)

    def reset(self):
        self.left, self.there = 0, set()

    def arrived(self, parameter):
        self.there.add(parameter)
        while self.left < len(self.queue) and self.queue[self.left][0] in self.there:
            self.send()

    def send(self):
        parameter, shard_S = self.queue[self.left]
        self.take(parameter, shard_S)
        self.drop(parameter)
        self.left += 1

    def take(self, parameter, shard_S):
        add(shard_S, self.mean(parameter))

    def drop(self, parameter):
        parameter.grad = None

    def finish(self):
        while self.left < len(self.queue):
            self.send()
        self.reset()

    def step(self):
        self.optimizer.step()
        self.spread()


class RightUnit:
    """A right answer to Unit."""

    def __init__(self, module):
        self.n = dist.get_world_size()
        self.params = self.parameters(module)
        self.shards = [self.shard(p) for p in self.params]
        self.works, self.is_free = [], False
        self.lay()
        self.free()

    def parameters(self, module):
        return list(module.parameters())

    def shard(self, p):
        return torch.nn.Parameter(shard(p.detach()), p.requires_grad)

    def lay(self):
        self.wholes = [s.new_empty(len(s) * self.n) for s in self.shards]
        for parameter, whole in zip(self.params, self.wholes, strict=True):
            parameter.data = whole[: parameter.numel()].view(parameter.shape)

    def start(self):
        if self.is_free:
            self.is_free = False
            self.issue()

    def issue(self):
        for whole, shard_S in zip(self.wholes, self.shards, strict=True):
            whole.untyped_storage().resize_(whole.nbytes)
            self.works.append(dist.all_gather_single(whole, shard_S.detach(), async_op=True))

    def wait(self):
        for work in self.works:
            work.wait()
        self.works.clear()

    def free(self):
        for whole in self.wholes:
            whole.untyped_storage().resize_(0)
        self.is_free = True

    def reduce(self):
        for p, s in zip(self.params, self.shards, strict=True):
            if p.requires_grad:
                self.take(p, s, self.mean(p))
                self.drop(p)

    def mean(self, p):
        grad = torch.zeros(p.shape, dtype=p.dtype) if p.grad is None else p.grad
        return reduced(pad(grad) / self.n)

    def take(self, p, s, mean_S):
        add(s, mean_S)

    def drop(self, p):
        p.grad = None


class RightSchedule:
    """A right answer to Prefetch."""

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
