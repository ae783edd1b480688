"""More wrong answers to 03_zero: what has another form, what does nothing, and what was ready."""

import torch

from tests.grading.zoo.wrong import Wrong, keeper, me
from tests.grading.zoo.zero_right import Right1, Right2, RightUnit, filled, pad

ZOO: list[Wrong] = []
wrong = keeper(ZOO)


@wrong("Stage1", "nothing was sent")
class DoesNothingInStage1(Right1):
    def step(self):
        pass


@wrong("Stage1", "which has no zero_grad()")
class HasNoZeroGrad:
    def __init__(self, params, optimizer_class, **kwargs):
        pass

    def step(self):
        pass


@wrong("Stage1", "write it yourself")
def the_chapters_own_instage1(params, optimizer_class, **kwargs):
    from manyranks.parallel.zero import ZeroOptimizer

    return ZeroOptimizer(params, optimizer_class, **kwargs)


@wrong("Stage1", "write it yourself")
class TheChaptersOwnInside:
    def __init__(self, params, optimizer_class, **kwargs):
        from manyranks.parallel.zero import ZeroOptimizer

        self.step, self.zero_grad = (inner := ZeroOptimizer(params, optimizer_class, **kwargs)).step, inner.zero_grad


@wrong("Stage1", "write it yourself")
def torchs_own_instage1(params, optimizer_class, **kwargs):
    from torch.distributed.optim import ZeroRedundancyOptimizer

    return ZeroRedundancyOptimizer(list(params), optimizer_class, **kwargs)


@wrong("Stage1", "write it yourself")
class UsesTheChaptersReduceScatter(Right1):
    def mean(self, parameter):
        from manyranks.parallel.sharding import reduce_scatter

        return reduce_scatter(pad(filled(parameter)) / me()[1])


@wrong("Stage1", "not written yet")
class CallsAnUnwrittenShard(Right1):
    def shard(self, parameter):
        return shard_to_be_written(parameter)


def shard_to_be_written(tensor):
    raise NotImplementedError  # your code here


@wrong("Stage2", "nothing was sent")
class DoesNothingInStage2(Right2):
    def hook(self):
        pass

    def finish(self):
        pass

    def step(self):
        pass


@wrong("Stage2", "which has no finish()")
class IsStage1(Right1):
    pass


@wrong("Stage2", "write it yourself")
def the_chapters_own_instage2(params, optimizer_class, **kwargs):
    from manyranks.parallel.zero import ZeroOptimizer

    return ZeroOptimizer(params, optimizer_class, stage=2, **kwargs)


@wrong("Stage2", "the training loop calls optimizer.finish()")
class FinishTakesMore(Right2):
    def finish(self, loss):
        pass


@wrong("Unit", "nothing was sent")
class DoesNothingInUnit(RightUnit):
    def lay(self):
        self.wholes = []

    def issue(self):
        pass

    def reduce(self):
        pass


@wrong("Unit", "which has no reduce()")
class HasNoReduce:
    def __init__(self, module):
        self.shards = []

    def start(self):
        pass

    def wait(self):
        pass

    def free(self):
        pass


@wrong("Unit", "write it yourself")
def torchs_own_inunit(module):
    from torch.distributed.fsdp import fully_shard

    return fully_shard(module)


@wrong("Unit", "write it yourself")
class TheChaptersOwnInUnit:
    def __init__(self, module):
        from manyranks.parallel.fsdp import Unit
        from manyranks.parallel.partition import cut

        self.unit = Unit(cut(module, [module], lambda parameter: None, []).parts[0])
        self.start = self.wait = self.free = self.reduce = lambda: None


@wrong("Unit", "the schedule calls unit.start()")
class StartTakesMore(RightUnit):
    def start(self, stream):
        pass


@wrong("Unit", "one Parameter for each of module.parameters()")
class CountsTheTiedTwice(RightUnit):
    def parameters(self, module):
        return [p for _, p in module.named_parameters(remove_duplicate=False)]


@wrong("Unit", "one Parameter for each of module.parameters()")
class MakesOneRow(RightUnit):
    """As the chapter does."""

    def __init__(self, module):
        super().__init__(module)
        self.shards = [torch.nn.Parameter(torch.cat([s.detach() for s in self.shards]))]
