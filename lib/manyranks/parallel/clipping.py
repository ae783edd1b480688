"""Makes PyTorch's gradient clipping refuse gradients that are spread over ranks.

torch.nn.utils.clip_grad_norm_ would take the norm of this rank's part, and each rank would
silently clip by a different norm. Code that cuts parameters names them here.
"""

from collections.abc import Iterable
from functools import wraps

from torch import Tensor
from torch.nn.utils import clip_grad

_clip = clip_grad._clip_grads_with_norm_


def refuse_alone(parameters: Iterable[Tensor], instead: str) -> None:
    """Lets PyTorch's function raise ValueError for these. instead: what to call."""
    for parameter in parameters:
        parameter.clipped_by = instead


@wraps(_clip)
def _clip_whole(parameters: Iterable[Tensor], *args, **kwargs) -> None:
    listed = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    for parameter in listed:
        if instead := getattr(parameter, "clipped_by", ""):
            raise ValueError(
                "torch.nn.utils.clip_grad_norm_ of a gradient that is spread over ranks: "
                f"it would clip by the norm of this rank's part; call {instead}"
            )
    _clip(listed, *args, **kwargs)


clip_grad._clip_grads_with_norm_ = _clip_whole  # which all forms of the function call
