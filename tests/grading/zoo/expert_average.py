"""Wrong answers to average of 08_expert."""

import torch
import torch.distributed as dist

from tests.grading.zoo.expert_right import RightAverage
from tests.grading.zoo.wrong import Wrong, keeper

ZOO: list[Wrong] = []
wrong = keeper(ZOO)
TASK = "average"
OVER_ALL = "expert gradients are averaged over all ranks"
OWN_EXPERTS = "expert gradients are not summed over the replicas"
SKIPPED = "a parameter whose .grad is None counts as 0"


def experts_by(divisor):
    """Sums over replicas, divided by this."""

    class Answer(RightAverage):
        def of_experts(self, experts):
            self.put(experts, self.summed(self.flat(experts), self.replicas) / divisor(self))

    return Answer


@wrong(TASK, OVER_ALL)
class ExpertsOverAll(RightAverage):
    cases = slice(2)

    def of_experts(self, experts):
        self.put(experts, self.summed(self.flat(experts), None) / self.n)


@wrong(TASK, OVER_ALL)
class AllInOneCall(RightAverage):
    """As data parallelism does it."""

    cases = slice(2)

    def __call__(self, dense, experts, replicas):
        self.n, both = dist.get_world_size(), [*dense, *experts]
        self.put(both, self.summed(self.flat(both), None) / self.n)


@wrong(TASK, OVER_ALL)
class ExpertsOverAllByReplicas(RightAverage):
    cases = slice(2)

    def of_experts(self, experts):
        self.put(experts, self.summed(self.flat(experts), None) / self.size)


@wrong(TASK, "mean over their replicas there, e times too large")
class MeanOverReplicas(experts_by(lambda self: self.size)):
    pass


@wrong(TASK, "expert gradients are sums")
class ExpertsSummed(experts_by(lambda self: 1)):
    pass


@wrong(TASK, "expert gradients are divided by N and by another number")
class ByNAndByE(experts_by(lambda self: self.n * self.e)):
    pass


@wrong(TASK, "expert gradients are divided by N and by another number")
class ByNAndByReplicas(experts_by(lambda self: self.n * self.size)):
    pass


@wrong(TASK, OWN_EXPERTS)
class OwnExperts(RightAverage):
    def of_experts(self, experts):
        self.put(experts, self.flat(experts) / self.n)


@wrong(TASK, OWN_EXPERTS)
class ExpertsAsTheyAre(RightAverage):
    def of_experts(self, experts):
        self.put(experts, self.flat(experts))


@wrong(TASK, OWN_EXPERTS)
class ExpertsByE(RightAverage):
    def of_experts(self, experts):
        self.put(experts, self.flat(experts) / self.e)


for answer in ZOO[3:]:
    answer.function.ranks = 4  # two replicas of each of two


@wrong(TASK, "dense gradients are sums")
class DenseSummed(RightAverage):
    def of_dense(self, dense):
        self.put(dense, self.summed(self.flat(dense), None))


@wrong(TASK, "dense gradients are this rank's own")
class DenseOwn(RightAverage):
    def of_dense(self, dense):
        pass


@wrong(TASK, "dense gradients are this rank's own")
class DenseOwnByN(RightAverage):
    def of_dense(self, dense):
        self.put(dense, self.flat(dense) / self.n)


@wrong(TASK, "dense gradients are averaged over the replicas only")
class DenseOverReplicas(RightAverage):
    ranks = 4

    def of_dense(self, dense):
        self.put(dense, self.summed(self.flat(dense), self.replicas) / self.size)


@wrong(TASK, "dense gradients are divided by the number of replicas")
class DenseByReplicas(RightAverage):
    ranks = 4

    def of_dense(self, dense):
        self.put(dense, self.summed(self.flat(dense), None) / self.size)


@wrong(TASK, "dense gradients are averaged over the replicas only")
class AllOverReplicas(RightAverage):
    """Both lists among the same few."""

    ranks = 4

    def of_dense(self, dense):
        self.put(dense, self.summed(self.flat(dense), self.replicas) / self.n)


@wrong(TASK, "all gradients are sums")
class NoDivision(RightAverage):
    def __call__(self, dense, experts, replicas):
        for parameters, group in ((dense, None), (experts, replicas)):
            self.put(parameters, self.summed(self.flat(parameters), group))


@wrong(TASK, "all gradients are divided twice")
class DividedBeforeAndAfter(RightAverage):
    def flat(self, parameters):
        return super().flat(parameters) / self.n


@wrong(TASK, "ReduceOp.AVG divides, too")
class MeansDividedAgain(RightAverage):
    def summed(self, flat, group):
        dist.all_reduce(flat, dist.ReduceOp.AVG, group)
        return flat


@wrong(TASK, "the gradients are as they were")
class NotPutBack(RightAverage):
    def put(self, parameters, flat):
        for parameter in parameters:
            parameter.grad = self.gradient(parameter)


@wrong(TASK, "the gradients are mixed up")
class CutInAnotherOrder(RightAverage):
    def put(self, parameters, flat):
        super().put(parameters[::-1], flat)


@wrong(TASK, "the gradients are mixed up")
class CutsFromTheBeginning(RightAverage):
    def put(self, parameters, flat):
        for parameter in parameters:
            parameter.grad = flat[: parameter.numel()].view_as(parameter)


@wrong(TASK, SKIPPED)
class SkipsNone(RightAverage):
    def flat(self, parameters):
        return torch.cat([p.grad.flatten() for p in parameters if p.grad is not None])

    def put(self, parameters, flat):
        super().put([p for p in parameters if p.grad is not None], flat)


@wrong(TASK, SKIPPED)
class FailsOnNone(RightAverage):
    def gradient(self, parameter):
        return parameter.grad


@wrong(TASK, SKIPPED)
class LeavesNone(RightAverage):
    def put(self, parameters, flat):
        missing = [p for p in parameters if p.grad is None]
        super().put(parameters, flat)
        for parameter in missing:
            parameter.grad = None


@wrong(TASK, "one call for each parameter", right_values=True)
class OneCallEach(RightAverage):
    def flat(self, parameters):
        return [self.gradient(parameter).flatten() for parameter in parameters]

    def summed(self, flat, group):
        for one in flat:
            dist.all_reduce(one, group=group)
        return torch.cat(flat)


@wrong(TASK, "gradients of experts go to all ranks there", right_values=True)
class ExpertsAmongZeros(RightAverage):
    """One all-reduce over all ranks, with a place for each rank's experts."""

    def of_experts(self, experts):
        flat = self.flat(experts)
        members = dist.get_process_group_ranks(self.replicas)
        places = flat.new_zeros(self.n, len(flat))
        places[self.r] = flat
        dist.all_reduce(places)
        self.put(experts, places[members].sum(0) / self.n)


@wrong(TASK, "no rank needs each of the others' gradients, only their sum", right_values=True)
class GathersDense(RightAverage):
    def of_dense(self, dense):
        flat = self.flat(dense)
        every = [torch.empty_like(flat) for _ in range(self.n)]
        dist.all_gather(every, flat)
        self.put(dense, sum(every) / self.n)


@wrong(TASK, "an all-reduce is one call, dist.all_reduce", right_values=True)
class LoopOfMessages(RightAverage):
    def of_dense(self, dense):
        flat = self.flat(dense)
        others = [rank for rank in range(self.n) if rank != self.r]
        rooms = [torch.empty_like(flat) for _ in others]
        works = [dist.isend(flat, k) for k in others] + [dist.irecv(room, k) for room, k in zip(rooms, others, strict=True)]
        for work in works:
            work.wait()
        self.put(dense, sum([flat, *rooms]) / self.n)


@wrong(TASK, "no rank needs each of the others' gradients, only their sum", right_values=True)
class ReducesAndBroadcasts(RightAverage):
    def summed(self, flat, group):
        if group is None:
            dist.reduce(flat, 0)
            dist.broadcast(flat, 0)
            return flat
        return super().summed(flat, group)


@wrong(TASK, "what is sent is float32")
class InFloat32(RightAverage):
    def summed(self, flat, group):
        return super().summed(flat.float(), group).double()


@wrong(TASK, "did not wait for its all_reduce")
class DoesNotWait(RightAverage):
    def summed(self, flat, group):
        dist.all_reduce(flat, group=group, async_op=True)
        return flat


@wrong(TASK, "all ranks must make the same calls in the same order")
class OnlyRankZero(RightAverage):
    def of_dense(self, dense):
        if self.r == 0:
            super().of_dense(dense)


@wrong(TASK, "dense[0] changed; hint: leave what you are given")
class TakesAStep(RightAverage):
    def put(self, parameters, flat):
        super().put(parameters, flat)
        for parameter in parameters:
            parameter.data -= 0.1 * parameter.grad


@wrong(TASK, "attempting to assign a gradient of size '[6]' to a tensor of size '[3, 2]'")
class FlatGradients(RightAverage):
    def put(self, parameters, flat):
        for parameter, part in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
            parameter.grad = part


@wrong(TASK, "manyranks.parallel")
class TheLibrarys(RightAverage):
    def of_dense(self, dense):
        from manyranks.parallel.expert import apply

        apply._average(dense, None)
