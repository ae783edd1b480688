"""The first weights of the small GPT."""

import math
import zlib

import torch
from torch import nn

_DEVIATION = 0.02  # of every matrix, as in GPT-2
_ROUTER = "router.weight"  # has scores of about 1, as 0.02 gives where the hidden size is 2,500
_RESIDUAL = ("attention.output.weight", "mlp.down.weight", "experts.down", "shared.down.weight")


def initialize(model: nn.Module, layers: int, seed: int) -> None:
    """Sets the weights; those that end in the residual stream are smaller by √(2·layers).

    A parameter has its own generator, seeded by its name, so that what it gets does not depend
    on which others there are. Source: GPT-2's, Radford et al. 2019, section 2.3.
    """
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            nn.init.constant_(parameter, 0.0 if name.endswith("bias") else 1.0)
            continue
        generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
        drawn = torch.empty(parameter.shape, dtype=torch.float32, device="cpu")
        deviation = parameter.shape[1] ** -0.5 if name.endswith(_ROUTER) else _DEVIATION
        drawn.normal_(0, deviation, generator=generator)
        residual = name.endswith(_RESIDUAL)
        with torch.no_grad():
            parameter.copy_(drawn / math.sqrt(2 * layers) if residual else drawn)
