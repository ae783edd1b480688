"""A shard never pretends to be a tensor: an optimizer may work on it, nobody may read it.

Outside the modules that compute with it, a sharded parameter is this rank's part of the
whole one, flat, maybe empty. A norm of it, or a product with it, would be a number of this
rank's own, so each operation that isn't an element's own business raises ValueError. While
a forward runs, the whole parameter takes its place: whoever reads it has it gathered.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import optimizer
from torch.utils import _foreach_utils
from torch.utils._pytree import tree_map_only

from manyranks.parallel.collectives.messages import Group

as_parts = torch._C.DisableTorchFunctionSubclass  # inside, shards are tensors like others

# What an optimizer does to each element by itself: in place, out of place, many at once.
_each = """
    abs absolute add addcdiv addcmul atan2 clamp clamp_max clamp_min clip copy copysign
    constant div divide eq erf exp expm1 fill floor ge gt isfinite isinf isnan le lerp
    log log1p logical_and logical_not logical_or lt masked_fill maximum minimum mul
    multiply nan_to_num ne neg negative positive pow reciprocal rsqrt sgn sigmoid sign
    sqrt square sub subtract tanh true_divide where zero truediv iadd isub imul itruediv
    ipow radd rsub rmul rdiv rtruediv rpow idiv and or xor invert
    amp_foreach_non_finite_check_and_unscale
"""
# What tells about a tensor, keeps or moves its elements as they are, or watches it.
_around = """
    bfloat16 clone contiguous cpu cuda detach dim double element_size float format
    get_device half has_compatible_shallow_copy_type len ndimension nelement numel
    pin_memory register_hook register_post_accumulate_grad_hook repr requires_grad
    result_type retain_grad set setstate share_memory size storage_offset stride to type
    type_as untyped_storage view_as_real
"""
_makers = "zeros_like ones_like full_like empty_like new_zeros new_ones new_full new_empty"
MAKERS = set(_makers.split())
ALLOWED = {*_each.split(), *_around.split()}
QUESTIONS = {name for name in dir(torch.Tensor) if name[:3] == "is_"} - {"is_nonzero"}
VIEWS = {"T", "mT", "H", "mH", "real", "imag"}  # attributes that read elements
DIMENSIONS = {"dim", "ndimension", "ndim"}


class Origin(NamedTuple):
    """A part's whole: its name and shape, the first element of the part, the ranks.

    gradient: of a matrix, whose sides an optimizer that needs all of it asks for
    """

    name: str = "a shard"
    shape: torch.Size = torch.Size()
    first: int = 0
    group: Group = None
    gradient: bool = False


class Shard(Tensor):
    """This rank's part of a tensor, which refuses what isn't done element by element.

    Results of elementwise operations are parts, too. dim() and ndim are the whole's, for
    weight decay goes by them; shape and numel() are this part's.
    """

    origin = Origin()

    def __hash__(self) -> int:
        return id(self)  # without __torch_function__, for optimizers look up each part

    @classmethod
    @torch._disable_dynamo  # as compiler.disable, without importing the compiler now
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs, name = kwargs or {}, _name(func)
        tensors = _tensors(func, args, kwargs)
        found = [x for x in tensors if isinstance(x, Shard)]
        if any(isinstance(x, ShardParameter) and x.reads() for x in found):
            return _of_whole(func, name, args, kwargs)
        first = found[0]
        if name in DIMENSIONS:
            return len(first.origin.shape)
        if name == "__setitem__" and isinstance(args[0], Shard):
            return _assign(*args)
        side = name == "size" and len(args) + len(kwargs) > 1  # they mean the whole's
        side |= name in ("size", "shape") and first.origin.gradient
        if not _may(func, name) or side or not _fit(found, tensors):
            raise ValueError(
                f"{name} of {first.origin.name}, outside its module's forward: here is "
                "only this rank's part, and each rank would get another result. Read "
                "it in a forward in the wrapper; or call full_state_dict() for all of it, "
                "clip_grad_norm_() for a norm of gradients, to_local() for this part"
            )
        with as_parts():
            result = func(*args, **kwargs)
        if name == "_amp_foreach_non_finite_check_and_unscale_":  # a GradScaler's
            for group in dict.fromkeys(x.origin.group for x in found):
                dist.all_reduce(args[1], dist.ReduceOp.MAX, group=group)
        if name in MAKERS or (func.__name__ == "__get__" and name not in ("data", "grad")):
            return result
        if isinstance(result, list | tuple):  # of many at once, or a size
            return type(result)(_result(x, first) for x in result)
        return _result(result, first)

    def to_local(self) -> Tensor:
        """Returns this rank's part as a plain tensor that shares its memory."""
        with torch.no_grad(), as_parts():
            return self.as_subclass(Tensor)

    def __reduce_ex__(self, protocol: int):
        return self.to_local().__reduce_ex__(protocol)  # a file has plain tensors

    def __deepcopy__(self, memo: dict) -> Tensor:
        return self.to_local().clone()


class ShardParameter(Shard, nn.Parameter):
    """A parameter of a sharded module: this rank's part, and the way to the whole one.

    whole: the parameter that modules compute with; its shape is right all the time
    reads: tells whether a module in the wrapper computes now
    gather: brings the whole one here, for the backward of the module that computes, too
    """

    whole: nn.Parameter
    reads: Callable[[], bool] = staticmethod(lambda: False)
    gather: Callable[[], None]


for _types in (_foreach_utils._foreach_supported_types, optimizer._foreach_supported_types):
    _types.append(ShardParameter)  # an optimizer may take many of them in one kernel


def as_part(tensor: Tensor, like: Shard) -> Shard:
    """Returns a tensor as this rank's part of something as `like` is."""
    if isinstance(tensor, Shard):
        return tensor
    with torch.no_grad(), as_parts():
        found = tensor.as_subclass(Shard)
    found.origin = like.origin
    return found


def as_gradient(tensor: Tensor, of: Shard) -> Shard:
    """Returns a tensor as this rank's part of the gradient of something."""
    found, origin = as_part(tensor, of), of.origin
    name, matrix = f"the gradient of {origin.name}", len(origin.shape) > 1
    found.origin = origin._replace(name=name, gradient=matrix)
    return found


def accumulate(shards: list[nn.Parameter], grads: list[Tensor | None]) -> None:
    """Adds to the shards' gradients, and calls the shards' hooks as autograd would."""
    for shard, grad in zip(shards, grads, strict=True):
        if grad is None:
            continue
        for hook in [*(shard._backward_hooks or {}).values()]:
            grad = grad if (changed := hook(grad)) is None else changed
        shard.grad = (
            as_gradient(grad, shard) if shard.grad is None else shard.grad.add_(grad)
        )
        for hook in [*(shard._post_accumulate_grad_hooks or {}).values()]:
            hook(shard)  # such as an optimizer's step, during backward


def _result(result: object, like: Shard) -> object:
    return as_part(result, like) if isinstance(result, Tensor) else result


def local(tensor: Tensor) -> Tensor:
    """Returns a part as a plain tensor that shares its memory; others as they are."""
    return tensor.to_local() if isinstance(tensor, Shard) else tensor


def is_shard(parameter: Tensor) -> bool:
    """Tells whether a wrapper has turned this parameter into its own rank's shard."""
    return hasattr(parameter, "whole")


def refuse_shards(named: Iterable[tuple[str, Tensor]], what: str) -> None:
    """Raises ValueError where a parameter is a shard already, which differs by rank.

    named: parameters with their names
    what: the class that can't take it
    """
    for name, parameter in named:
        if is_shard(parameter):
            raise ValueError(
                f"{name} is this rank's shard of a fully sharded module: {what} would mix "
                "up the ranks' shards; give it the parameters outside that module only"
            )


def _name(func: Callable) -> str:
    """The function's name, or the attribute's that it gets or sets."""
    attribute = func.__name__ in ("__get__", "__set__", "__delete__")
    return func.__self__.__name__ if attribute else func.__name__


def _tensors(func: Callable, args: tuple, kwargs: dict) -> list[Tensor]:
    """The tensors among a function's arguments, and in lists of many at once."""
    if func.__name__ == "__get__":
        return [args[0]]
    found = []
    for value in (*args, *kwargs.values()):
        many = value if isinstance(value, list | tuple) else (value,)
        found += [x for x in many if isinstance(x, Tensor)]
    return found


def _tells(func: Callable, name: str) -> bool:
    """Returns whether it's about a tensor as such, and not about its elements."""
    if func.__name__ == "__get__":
        return name not in VIEWS | {"data"}
    return name.startswith("is_") or name in ("size", "numel", "stride", *DIMENSIONS)


def _may(func: Callable, name: str) -> bool:
    if func.__name__ in ("__get__", "__set__", "__delete__"):
        return name not in VIEWS
    plain = name.strip("_").removeprefix("foreach_")
    return plain in ALLOWED or name in MAKERS | QUESTIONS or name.startswith("_fused_")


def _fit(parts: list[Shard], tensors: list[Tensor]) -> bool:
    """Returns whether others are as large as a part: states, masks, or one number."""
    if len(parts) == len(tensors):
        return True
    with as_parts():
        sizes = {part.numel() for part in parts}
        return all(x.dim() == 0 or x.numel() in sizes for x in tensors)


def _assign(part: Shard, index: object, value: float) -> None:
    """Sets the elements at an index of the whole; each rank sets those that it has."""
    shape, first = part.origin.shape, part.origin.first
    if isinstance(index, Shard):  # a mask made of this part, or of one as large
        part.to_local()[index.to_local()] = local(value)
        return
    if isinstance(value, Tensor) and value.numel() != 1:
        raise ValueError(
            f"{part.origin.name} was given {value.numel()} values by index: this rank has "
            "a part of it; give one value, or load a state dict"
        )
    all_E = torch.arange(shape.numel(), device=part.device)
    at = all_E.view(shape)[index].flatten() - first
    part.to_local()[at[(at >= 0) & (at < len(part))]] = value


def _of_whole(func: Callable, name: str, args: tuple, kwargs: dict) -> object:
    """Calls a function of the whole parameters, which are gathered if it reads them."""

    def whole(x: Tensor) -> Tensor:
        if not isinstance(x, ShardParameter):
            return local(x)
        if func.__name__ == "__set__":
            raise ValueError(
                f"{x.origin.name}.{name} was set in a forward: a sharded parameter changes "
                "in the optimizer only"
            )
        if not _tells(func, name):
            x.gather()
        return x.whole

    args, kwargs = tree_map_only(Shard, whole, (args, kwargs))
    return func(*args, **kwargs)
