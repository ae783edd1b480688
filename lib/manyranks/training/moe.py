"""The feed-forward part made of experts, on one process: router, experts, shared experts.

B batch   S sequence   H hidden size   T tokens, B·S
"""

from torch import Tensor, nn

from manyranks.parallel.expert import Experts, Router
from manyranks.training.config import GPTConfig


class MoE(nn.Module):
    """Each token's top_k experts, weighted by its gates, and all shared experts.

    shared: the module that every token goes through, or None.
    """

    def __init__(self, config: GPTConfig, shared: nn.Module | None = None):
        super().__init__()
        shape = config.shape()
        self.router = Router(
            shape.hidden,
            shape.experts,
            shape.top_k,
            config.scores,
            normalize=shape.top_k > 1,
            groups=shape.expert_groups,
            groups_per_token=shape.groups_per_token,
            capacity=config.capacity,
            auxiliary=config.auxiliary,
            bias_speed=config.bias_speed,
        )
        self.experts = Experts(shape.experts, shape.hidden, shape.expert_ffn)
        self.shared = shared

    def forward(self, x_BSH: Tensor) -> Tensor:
        x_TH = x_BSH.flatten(0, 1)
        y_BSH = self.experts(x_TH, self.router(x_TH)).view_as(x_BSH)
        return y_BSH if self.shared is None else y_BSH + self.shared(x_BSH)
