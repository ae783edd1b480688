"""DualPipe: micro-batches enter at both ends; a forward runs beside another's backward.

    rank               0           1           2           3
    from rank 0     stage 0  →  stage 1  →  stage 2  →  stage 3
    from rank 3     stage 3  ←  stage 2  ←  stage 1  ←  stage 0

So rank r has stages r and p − 1 − r, and every stage is there twice. Each copy sees half of
the micro-batches, and at the end of a step its two ranks add up their gradients (split.Tied
does). In return a rank always has a forward of one direction to do beside a backward of the
other: while one waits for its messages, the other computes. A GPU runs the two on separate
streams. Our ranks compute them one after the other, but both have come before, and both
leave after; Times(pair=0.75) says what the two together take, on the clock and on paced
ranks. Ranks r and p − 1 − r do the same things at the same time, each for its own end.

    schedule = dualpipe(4, 10)
    stages = split(model, 4)
    mine = {s: stages[s] for s in schedule.stages_of(dist.get_rank())}
    losses = Pipeline(mine, schedule, loss=loss).step(inputs, targets)

Inputs and targets are needed at both ends, and each end has half of the losses. Copies
start equal; with equal gradients they stay so.
Source: DeepSeek-V3, arXiv 2412.19437, section 3.2.1; github.com/deepseek-ai/DualPipe.
"""

from dataclasses import dataclass

from manyranks.parallel.pipeline.schedules import (
    Action,
    Pair,
    Schedule,
    check_degrees,
    dualpipe_v,
    one_stage_a_rank,
    singles,
)


@dataclass(frozen=True)
class BothWays(Schedule):
    """Stages r and p − 1 − r on rank r.

    placement: of the first half of the micro-batches, which enter at rank 0. Where m is
    odd, the first half has one more. The others enter at rank p − 1.
    """

    def ranks_of(self, stage: int) -> tuple[int, ...]:
        return stage, self.stages - 1 - stage

    def rank_of(self, stage: int, microbatch: int) -> int:
        first = microbatch < (self.microbatches + 1) // 2
        return stage if first else self.stages - 1 - stage


def dualpipe(p: int, m: int) -> BothWays:
    """Returns the schedule of p ranks and m micro-batches, from both ends together.

    A rank does what one of DualPipeV does, which is this schedule cut in half: where that
    turns to its second stage, a micro-batch here goes on to the other half of the ranks.
    Bubble (p/2 − 1)(F&B + B − 3W) for an even m ≥ 2p, F&B being what a Pair takes, and one
    F&B more for an odd m; p + 1 activations in flight, each of one micro-batch in a stage;
    all parameters twice. Raises ValueError for an odd p, and for a p or m below 1.
    """
    check_degrees(p=p, m=m)
    if p % 2:
        raise ValueError(f"p={p}: two ranks share their two stages; give an even p")
    half = (m + 1) // 2
    v = dualpipe_v(p // 2, half)
    ranks = []
    for rank in range(p):
        before = {rank: 0, p - 1 - rank: half}  # by stage: micro-batches from the other end
        row: list[Action | Pair] = []
        for item in v.ranks[min(rank, p - 1 - rank)]:
            moved = [Action(kind, s, k + before[s]) for kind, s, k in singles(item)]
            own = [action for action in moved if action.microbatch < m]
            row += [Pair(*own)] if len(own) == 2 else own
        ranks.append(tuple(row))
    return BothWays("dualpipe", m, one_stage_a_rank(p), tuple(ranks))
