"""Dropout under tensor parallelism: which ranks draw the same masks, and which their own.

Where every rank has the same activations, all must drop the same of them. Where each has
others (its heads; its tokens), masks must differ, or one pattern is repeated t times.

All ranks seed their generator with the same number: what is drawn from it is common. A
rank's own mask comes from a generator seeded by a number that is drawn in common, and by
the rank. So to set the common generator back, as activation checkpointing does, brings back
all masks.

Source of the rule: Megatron-LM, arXiv 1909.08053, appendix B.2.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from types import MethodType

import torch
from torch import Tensor, nn

from manyranks.parallel.collectives.messages import Group
from manyranks.parallel.tensor.cuts import rank

_PRIME = 2_654_435_761  # Knuth's multiplier, so that neighbors' seeds are far apart


def draw_own_masks(dropout: nn.Module, group: Group = None) -> None:
    """Lets the module draw on each rank what no other rank draws, in place."""
    plain = type(dropout).forward

    def forward(self: nn.Module, x: Tensor) -> Tensor:
        if not self.training or getattr(self, "rate", getattr(self, "p", 1)) == 0:
            return plain(self, x)  # which draws nothing
        with own_randomness(group, x.device):
            return plain(self, x)

    dropout.forward = MethodType(forward, dropout)  # of a copy of the module, the copy's


@contextmanager
def own_randomness(
    group: Group = None, device: torch.device | str = "cpu"
) -> Iterator[None]:
    """Inside, random numbers differ from rank to rank; after it, they go on in common."""
    seed = int(torch.randint(2**31, (), device="cpu"))
    device = torch.device(device)
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        own = seed + _PRIME * (rank(group) + 1)
        # torch.manual_seed seeds all kinds of devices, which takes ten times as long.
        torch.default_generator.manual_seed(own)
        if device.type == "cuda":
            with torch.cuda.device(device):
                torch.cuda.manual_seed(own)
        yield
