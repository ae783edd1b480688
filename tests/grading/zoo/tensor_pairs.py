"""Wrong answers to copy_in and reduce_out of 06_tensor."""

import contextlib
import os
import time

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as with_gradients

from tests.grading.zoo.tensor_right import Both, RightF, RightG
from tests.grading.zoo.wrong import Wrong, keeper

ZOO: list[Wrong] = []
wrong = keeper(ZOO)
F, G = "copy_in", "reduce_out"


@wrong(F, "it returned a NoneType; hint: it returns a list")
@wrong(G, "it returned a NoneType; hint: it returns a list")
def returns_nothing(tensors, group=None):
    pass


@wrong(F, "it returned a Tensor; hint: it returns a list")
@wrong(G, "it returned a Tensor; hint: it returns a list")
def returns_the_first(tensors, group=None):
    return tensors[0]


@wrong(F, "that is this rank's part of the gradient")
@wrong(G, "that is this rank's part: g is for what each rank has a part of")
def does_nothing(tensors, group=None):
    return tensors


@wrong(G, "result 0 has no graph")
def detaches(tensors, group=None):
    return [RightG()([tensor.detach()], group)[0] for tensor in tensors]


wrong(F, "that is summed in forward, which is g")(RightG)
wrong(G, "that is f: g is for what each rank has a part of")(RightF)


class SumsBothWays(RightF):
    def there(self, tensors):
        return self.sum(tensors)


wrong(F, "f is silent there, and sums in backward only")(SumsBothWays)
wrong(G, "the gradient is summed, which is f's work")(SumsBothWays)


@wrong(G, "the gradient is summed, which is f's work")
def by_pytorchs_all_reduce(tensors, group=None):
    """Whose backward sums, too."""
    row = with_gradients.all_reduce(torch.cat([tensor.flatten() for tensor in tensors]), group=group or dist.group.WORLD)
    parts = row.split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


def of_both(says_f, says_g, right_values=False, ranks=3):
    """A decorator: the way to sum below it, in f and in g. ranks: on how many it shows."""

    def keep(reduce):
        for task, base, says in ((F, RightF, says_f), (G, RightG, says_g)):
            wrong(task, says, right_values)(type(reduce.__name__, (base,), {"reduce": reduce, "ranks": ranks}))
        return reduce

    return keep


@of_both("that is a mean: sums are not divided by t", "that is a mean: sums are not divided by t")
def divides(self, row):
    dist.all_reduce(row, group=self.group)
    row /= dist.get_world_size(self.group)


@of_both("once more makes t times as much", "once more makes t times as much")
def sums_twice(self, row):
    dist.all_reduce(row, group=self.group)
    dist.all_reduce(row, group=self.group)


@of_both("those are the largest, not the sums", "those are the largest, not the sums")
def takes_the_largest(self, row):
    dist.all_reduce(row, op=dist.ReduceOp.MAX, group=self.group)


@of_both("dist.reduce gives the sum to one rank only", "dist.reduce gives the sum to one rank only")
def reduces_to_one(self, row):
    dist.reduce(row, group_dst=0, group=self.group)


@of_both("called all_reduce among 4 ranks; its group has 2", "called all_reduce among 4 ranks; its group has 2", ranks=4)
def forgets_the_group(self, row):
    dist.all_reduce(row)


@of_both("keep what it returns and call .wait() on it", "keep what it returns and call .wait() on it")
def does_not_wait(self, row):
    self.work = dist.all_reduce(row, group=self.group, async_op=True)


@of_both("called all_gather of", "called all_gather of", right_values=True)
def gathers_and_adds(self, row):
    parts = [torch.empty_like(row) for _ in range(dist.get_world_size(self.group))]
    dist.all_gather(parts, row, group=self.group)
    row.copy_(sum(parts))


@of_both("called all_reduce of 216 bytes 2 times", "all_reduce of 240 bytes and all_reduce of 248 bytes", right_values=True)
def sums_halves(self, row):
    for half in row.chunk(2):
        dist.all_reduce(half, group=self.group)


@of_both("waits in all_reduce", "waits in all_reduce")
def only_the_first_calls(self, row):
    if dist.get_rank(self.group) == 0:
        dist.all_reduce(row, group=self.group)


@of_both("float64 has to stay float64 on its way", "float64 has to stay float64 on its way")
def rounds(self, row):
    small = row.float()
    dist.all_reduce(small, group=self.group)
    row.copy_(small)


@of_both("ZeroDivisionError", "ZeroDivisionError")
def raises(self, row):
    row /= 1 / 0


@of_both("rank 1", "rank 1")
def ends_one_rank(self, row):
    if dist.get_rank() == 1:
        os._exit(0)
    dist.all_reduce(row, group=self.group)


@wrong(F, "a loop does not end")
class NeverEnds(RightF):
    seconds = 3

    def reduce(self, row):
        while True:
            with contextlib.suppress(BaseException):
                time.sleep(0.05)


class OneCallEach(RightF):
    def sum(self, tensors):
        return [super(OneCallEach, self).sum([tensor])[0] for tensor in tensors]


class OneCallEachOfG(RightG):
    def sum(self, tensors):
        return [super(OneCallEachOfG, self).sum([tensor])[0] for tensor in tensors]


wrong(F, "put them into one flat row", right_values=True)(OneCallEach)
wrong(G, "put them into one flat row", right_values=True)(OneCallEachOfG)


@wrong(F, "ask ctx.needs_input_grad, and leave it out of the row", right_values=True)
class SendsAllGradients(RightF):
    def back(self, grads, needed):
        return self.sum(grads)


@wrong(F, "all ranks put in as many elements", right_values=True)
class SendsWhatIsUsed(RightF):
    """Only gradients that are not zero."""

    def sum(self, tensors):
        used = [tensor for tensor in tensors if tensor.any()]
        found = iter(super().sum(used))
        return [next(found) if tensor.any() else tensor for tensor in tensors]


class InPlace(RightF):
    def sum(self, tensors):
        for tensor in tensors:
            dist.all_reduce(tensor.data, group=self.group)
        return tensors


@wrong(F, "the gradient that backward gets is not yours alone: sum a copy")
class InPlaceInBackward(InPlace):
    def sum(self, tensors):
        return [super(InPlaceInBackward, self).sum([self.plain(tensor)])[0] for tensor in tensors]

    def plain(self, tensor):
        return tensor if tensor.is_contiguous() else tensor.contiguous()


@wrong(G, "leave what you are given as it is: sum a copy")
class InPlaceInForward(RightG):
    def sum(self, tensors):
        for tensor in tensors:
            dist.all_reduce(tensor.data, group=self.group)
        return [tensor.view_as(tensor) for tensor in tensors]


@wrong(G, "leave what you are given as it is: sum a copy")
def in_place(tensors, group=None):
    for tensor in tensors:
        dist.all_reduce(tensor, group=group)
    return tensors


class OneIsAView(RightF):
    def sum(self, tensors):
        if len(tensors) > 1:
            return super().sum(tensors)
        row = tensors[0].flatten()
        self.reduce(row)
        return [row.view(tensors[0].shape)]


@wrong(F, "flatten gives a view where a tensor is contiguous, torch.cat a copy")
class OneGradientIsAView(OneIsAView):
    pass


@wrong(G, "flatten gives a view where a tensor is contiguous, torch.cat a copy")
class OneTensorIsAView(OneIsAView):
    def there(self, tensors):
        return self.sum(tensors)

    def back(self, grads, needed):
        return grads


@wrong(F, "one entry for each argument of apply, the group's first")
class NeedsOffByOne(RightF):
    def back(self, grads, needed):
        return super().back(grads, (False, *needed[:-1]))


@wrong(F, "apply takes tensors one by one")
def gives_apply_a_list(tensors, group=None):
    return Both.apply(lambda given: given, lambda grads, needed: grads, tensors)


@wrong(F, "reshape(-1) in place of view(-1)")
class ViewsGradients(RightF):
    def sum(self, tensors):
        return super().sum([tensor.view(-1).view(tensor.shape) for tensor in tensors])


@wrong(F, "backward returns one for each argument of apply")
class ReturnsTooFew(RightF):
    def back(self, grads, needed):
        return super().back(grads, needed)[:-1]


@wrong(F, "it returned tensors of")
@wrong(G, "it returned tensors of")
def returns_them_flat(tensors, group=None):
    return [tensor.flatten() for tensor in tensors]


@wrong(F, "manyranks.parallel.tensor.mappings is not allowed")
@wrong(G, "manyranks.parallel.tensor.mappings is not allowed")
def the_librarys(tensors, group=None):
    from manyranks.parallel.tensor import mappings

    mappings.all_reduce(tensors[0].detach(), group)
    return tensors


@wrong(G, "functional collectives do not count here; hint: call dist's own: dist.all_reduce")
class ByFunctionalCollectives(RightG):
    def reduce(self, row):
        from torch.distributed import _functional_collectives as functional

        row.copy_(functional.all_reduce(row, "sum", self.group or dist.group.WORLD))


@wrong(F, "the check calls copy_in(tensors, group)")
def takes_no_group(tensors):
    return tensors
