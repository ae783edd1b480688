"""Other right answers to the last task of 06_tensor, which must get full marks."""

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as with_gradients
from torch.nn import functional as F

from tests.grading.zoo.tensor_alike import Async
from tests.grading.zoo.tensor_right import Both, RightBlock, all_gather, reduce_scatter


class ByLists(RightBlock):
    """The list forms of the calls."""

    def gathers_grad(self, grad):
        out = grad.chunk(self.t)[0].clone()
        dist.reduce_scatter(out, [part.contiguous() for part in grad.chunk(self.t)], group=self.group)
        return out

    def scatters_grad(self, grad):
        parts = [torch.empty_like(grad) for _ in range(self.t)]
        dist.all_gather(parts, grad.contiguous(), group=self.group)
        return torch.cat(parts)


class ByOlderNames(RightBlock):
    def scatter(self, part):
        def scatter(tensors):
            out = tensors[0].new_empty(len(tensors[0]) // self.t, *tensors[0].shape[1:])
            dist.reduce_scatter_tensor(out, tensors[0].contiguous(), group=self.group)
            return [out]

        return Both.apply(scatter, lambda grads, _: [self.scatters_grad(grads[0])], part)[0]

    def scatters_grad(self, grad):
        whole = grad.new_empty(len(grad) * self.t, *grad.shape[1:])
        dist.all_gather_into_tensor(whole, grad.contiguous(), group=self.group)
        return whole


class ByHooksOnSavedTensors(RightBlock):
    """PyTorch's gather with gradients, whose result is kept as a shard."""

    def gather_up(self, h):
        whole = Both.apply(
            lambda tensors: [all_gather(tensors[0], self.group)], lambda grads, _: [reduce_scatter(grads[0], self.group)], h
        )[0]
        shapes = whole.shape, whole.flatten(0, 1).shape

        def pack(tensor):
            if tensor.shape not in shapes:
                return tensor, None
            return h.detach(), tensor.shape

        def unpack(kept):
            tensor, was = kept
            return tensor if was is None else all_gather(tensor, self.group).view(was)

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            return self.up(whole)


class WithGradients(RightBlock):
    """torch.distributed.nn.functional's, whose gather goes back by an all-to-all."""

    def scatter(self, part):
        group = self.group or dist.group.WORLD
        parts = [one.contiguous() for one in part.chunk(self.t)]
        return with_gradients.reduce_scatter(torch.empty_like(parts[0]), parts, group=group)


class FunctionalDropout(RightBlock):
    """F.dropout with the seed, and random numbers as they were afterwards."""

    def drop(self, y, seed):
        with torch.random.fork_rng([]):
            torch.manual_seed(self.seed(seed) + 1000)
            return F.dropout(y, self.p)


class SumsAsync(RightBlock):
    """norm's gradients by a Function of its own, which starts before it waits."""

    def parameters_here(self):
        return Async()([self.norm.weight, self.norm.bias, self.down.bias], self.group)


ANSWERS = [
    ("Block", answer) for answer in (ByLists, ByOlderNames, ByHooksOnSavedTensors, WithGradients, FunctionalDropout, SumsAsync)
]
