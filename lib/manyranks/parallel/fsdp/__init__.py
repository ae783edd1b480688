"""FSDP: stage 3 of ZeRO in units, such as layers, with messages beside computing.

    forward    gather 1 | compute 1, gather 2 | free 1, compute 2, gather 3 | …
    backward   compute L, gather L−1 | free L, reduce L, compute L−1, gather L−2 | …

Two of L units are whole at a time: the one that computes and the next one. The last one
stays after forward, because backward starts with it. In backward three things happen at
once: a unit computes, the next one is on its way here, and the gradients of the previous
one are on their way to their owners. So a rank sends, for Φ parameters on N ranks,
(N − 1)/N times Φ for forward, Φ less the last unit for backward, and Φ for the gradients.

    model = FullyShardedDataParallel(model, compute_dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loss(model(x), y).backward(); model.finish(); optimizer.step(); optimizer.zero_grad()

    apply   the wrapper, and a step: when units come and go
    unit    parameters that are gathered, freed and reduced together
    cut     which parameters make a unit, and which modules need it
    order   ranks compare the order in which they use units
    state   a wrapper between steps: its whole state, what it holds, its norm

Source: Zhao et al., "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel",
arXiv 2304.11277, sections 3 and 4.
"""

from manyranks.parallel.fsdp.apply import FullyShardedDataParallel
from manyranks.parallel.fsdp.state import full_state_dict

__all__ = ["FullyShardedDataParallel", "full_state_dict"]
