"""More wrong answers to 04_checkpointing: other forms, what was ready, what builds on a wrong checkpoint."""

from tests.grading.zoo.checkpointing_right import Right, RightShares
from tests.grading.zoo.wrong import Wrong, keeper

ZOO: list[Wrong] = []
wrong = keeper(ZOO)
ONE, TASK = "checkpoint", "shared_checkpoint"


@wrong(ONE, "it returned a tuple")
def returns_a_tuple(function, x):
    return function(x), x


@wrong(ONE, "it returned a NoneType")
def returns_nothing(function, x):
    function(x)


@wrong(ONE, "the check calls checkpoint(function, x)")
def takes_one_argument(x):
    return x


@wrong(TASK, "is not allowed; ")
def the_chapters_shares(function, x, group):
    from manyranks.parallel.checkpointing import partitioned_checkpoint

    return partitioned_checkpoint(group, function, x)


@wrong(TASK, "is not allowed; ")
class TorchsInside(RightShares):
    def checkpoint(self, function, x):
        from torch.utils.checkpoint import checkpoint

        return checkpoint(function, x, use_reentrant=True)


@wrong(TASK, "the check calls shared_checkpoint(function, x, group)")
def takes_two_arguments(function, x):
    return function(x)


def checkpoint(function, x):
    """The learner's own, which the next ones call; it does not set the random numbers back."""
    return Forgetful()(function, x)


class Forgetful(Right):
    def put_back(self, now):
        pass


@wrong(TASK, "your checkpoint does not pass its own check: mend it first")
def builds_on_a_wrong_checkpoint(function, x, group):
    return checkpoint(function, x)
