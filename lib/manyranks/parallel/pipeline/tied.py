"""Parameters that several stages share, such as an embedding that is also the head.

Each rank that has such a stage has a copy, and the gradient of what its own stages do with
it. The parameter's gradient is the sum: an all-reduce between these ranks, nearly always
the first and the last. Two of them swap gradients and add, which is as many bytes as any
all-reduce of two sends, and takes no group of their own, which all ranks of all pipelines
would have to make together. Copies that start equal so stay equal.
"""

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from manyranks.parallel.collectives.messages import members, wait
from manyranks.parallel.data_parallel import DataParallel
from manyranks.parallel.pipeline.actions import Schedule
from manyranks.parallel.pipeline.split import Shared, Stage
from manyranks.parallel.sharded import Sharded


class Tied:
    """This rank's parameters that other ranks' stages have, too.

    Raises ValueError for one that is sharded, or in two wrappers on this rank.
    """

    def __init__(
        self,
        stages: Mapping[int, nn.Module],
        schedule: Schedule,
        group: dist.ProcessGroup | None,
    ):
        shared = [
            one
            for stage in stages.values()
            for part in stage.modules()
            for one in (part.shared if isinstance(part, Stage) else ())
            if one.parameter.requires_grad
        ]
        for one in shared:
            _check_wrapped(one, stages)
        placed = {p: sorted({schedule.placement[s] for s in of}) for p, of in shared}
        self._ranks_of = {p: ranks for p, ranks in placed.items() if len(ranks) > 1}
        self._everyone = members(group)

    def begin(self) -> None:
        """Before the step: gradients of earlier steps, already summed, count once."""
        for parameter, ranks in self._ranks_of.items():
            if parameter.grad is not None:
                parameter.grad /= len(ranks)

    def finish(self) -> None:
        """After the step: each gradient becomes the sum of the ranks', in their order."""
        for parameter, ranks in self._ranks_of.items():
            own = parameter.grad
            if own is None:
                own = parameter.grad = torch.zeros_like(parameter)
            parts = self._swapped(own.contiguous(), ranks)
            parameter.grad.copy_(sum(parts[1:], start=parts[0]))

    def _swapped(self, own: Tensor, ranks: list[int]) -> list[Tensor]:
        """What each of the ranks has, of which this is one."""
        rank = self._everyone.place
        parts = {r: own if r == rank else torch.empty_like(own) for r in ranks}
        others = [r for r in ranks if r != rank]
        works = [self._everyone.post(own, r, parts[r], r) for r in others]
        for both in works:
            wait(both)
        return list(parts.values())


def _check_wrapped(shared: Shared, stages: Mapping[int, nn.Module]) -> None:
    """Each wrapper averages what it has, when its own stage's gradients are complete."""
    here = [s for s in shared.stages if s in stages]
    if any(isinstance(stages[s], Sharded) for s in here):
        raise ValueError(
            f"stages {shared.stages} share a parameter that is sharded in stage {here[0]}: "
            "the gradients' parts would not fit each other; untie it, or use data "
            "parallelism"
        )
    if len(here) > 1 and any(isinstance(stages[s], DataParallel) for s in here):
        raise ValueError(
            f"stages {here} share a parameter, and each is in a wrapper that would average "
            "it: put an nn.ModuleList of this rank's stages into one, give Pipeline the "
            "stages themselves, and call the wrapper's finish() after step()"
        )
