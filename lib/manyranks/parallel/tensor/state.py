"""The states of a model that is cut over ranks, and of its optimizer, for any other number.

Two ways, whatever t the one that saves and the one that loads have:

    state = full_state_dict(module, cuts, group)        # whole tensors, on every rank
    load_full_state_dict(module, state, cuts)           # as nn.Module's own, of one process

    state = tensor_state(module, cuts, optimizer, group)             # no rank has all of it
    torch.distributed.checkpoint.save(state, checkpoint_id=folder)   # or .load, in place

cuts: of the parameters that are cut, by name, as TensorParallel's; the others every rank
has. Filling is left out of what is saved, so that a vocabulary of any size goes from one t
to another; of what several ranks have, such as key/value heads, one copy is.
"""

import math

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from manyranks.parallel.collectives.messages import Group
from manyranks.parallel.precision import make_states
from manyranks.parallel.tensor.cuts import Cut, Span, size

Cuts = dict[str, Cut]


@torch.no_grad()
def full_state_dict(
    module: nn.Module, cuts: Cuts, group: Group = None
) -> dict[str, Tensor]:
    """The module's state_dict as one process would have it: whole copies, on every rank.

    All ranks of the group call it. A tied parameter is one tensor under all its names.
    """
    once = module.named_parameters()
    wholes = {p: _gathered(p, cuts.get(name), group) for name, p in once}
    named = dict(module.named_parameters(remove_duplicate=False))
    return {
        name: wholes[named[name]] if name in named else value.clone()
        for name, value in module.state_dict().items()
    }


@torch.no_grad()
def load_full_state_dict(module: nn.Module, state: dict[str, Tensor], cuts: Cuts) -> None:
    """Each rank takes its parts of whole tensors. No communication.

    Raises ValueError for a tensor of another size than the model's, and RuntimeError as
    nn.Module.load_state_dict for names that differ.
    """
    named = dict(module.named_parameters(remove_duplicate=False))
    parts = {
        name: _own(name, value, named[name], cuts.get(name)) if name in named else value
        for name, value in state.items()
    }
    module.load_state_dict(parts)


def tensor_state(
    module: nn.Module,
    cuts: Cuts,
    optimizer: torch.optim.Optimizer | None = None,
    group: Group = None,
) -> dict:
    """Returns what a checkpoint is to hold of this rank: {"model": …, "optimizer": …}.

    Its tensors are the shards themselves, not copies, so that a load fills them: DTensors,
    whose parts PyTorch's checkpoint gives to whoever needs them. An optimizer that has not
    stepped gets the states that it would have before its first step. Learning rates and
    other options are not in it.
    """
    places, state = _Places(group), {"model": {}}
    if optimizer is not None:
        make_states(optimizer)
        state["optimizer"] = {}
    for name, p in module.named_parameters():
        state["model"] |= places.of(name, p, p, cuts.get(name))
        for kind, value in optimizer.state.get(p, {}).items() if optimizer else ():
            if isinstance(value, Tensor):
                state["optimizer"] |= places.of(f"{name} {kind}", value, p, cuts.get(name))
    state["model"] |= {f"buffer {name}": b for name, b in module.named_buffers()}
    return state


class _Places:
    """Says to PyTorch which part of a whole tensor a shard is: torch.chunk's parts.

    Where neighbors have copies, the ranks are a mesh of parts × copies.
    """

    def __init__(self, group: Group):
        self.group, self._meshes = group, {}

    def of(self, name: str, shard: Tensor, parameter: Tensor, cut: Cut | None) -> dict:
        """DTensors in the shard's memory, without filling; what is not cut is itself.

        Several slices become several DTensors: name, name[1], …
        """
        shard = shard.detach()
        if cut is None or shard.dim() == 0:  # a counter, such as AdamW's step
            return {name: shard}
        if shard.shape != parameter.shape:
            raise ValueError(
                f"an optimizer's state of shape {tuple(shard.shape)} for a parameter of "
                f"shape {tuple(parameter.shape)}: what is not of a number for each element "
                "cannot be put together; use an elementwise optimizer, as AdamW"
            )
        of_slices = zip(*cut.spans, strict=True)  # one slice of each rank
        slices = zip(cut.slices(shard, cut.place), of_slices, strict=True)
        return {
            f"{name}[{k}]" if k else name: self._placed(own, cut.dim, spans)
            for k, (own, spans) in enumerate(slices)
        }

    def _placed(self, own: Tensor, dim: int, spans: tuple[Span, ...]) -> Tensor:
        from torch.distributed.tensor import DTensor, Replicate, Shard  # a second

        if len(spans) == 1:
            return own
        shape = list(own.shape)
        shape[dim] = max(stop for _, stop in spans) - min(start for start, _ in spans)
        return DTensor.from_local(
            own,
            self._mesh(spans.count(spans[0]), own.device.type),
            [Shard(dim), Replicate()],
            run_check=False,
            shape=tuple(shape),
            stride=tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape))),
        )

    def _mesh(self, copies: int, device: str) -> DeviceMesh:
        if (key := (copies, device)) not in self._meshes:
            ranks = dist.get_process_group_ranks(self.group or dist.group.WORLD)
            # Only says who has what: it needs no new groups.
            grid = torch.tensor(ranks, device="cpu").view(-1, copies)
            self._meshes[key] = DeviceMesh(device, grid, _init_backend=False)
        return self._meshes[key]


def _gathered(parameter: Tensor, cut: Cut | None, group: Group) -> Tensor:
    """A whole copy."""
    if cut is None:
        return parameter.clone()
    shards = parameter.new_empty(len(cut.spans), *parameter.shape)
    if size(group) > 1:
        dist.all_gather_single(shards.flatten(0, 1), parameter.contiguous(), group=group)
    else:
        shards[0] = parameter
    return cut.whole(shards.unbind())


def _own(name: str, whole: Tensor, parameter: Tensor, cut: Cut | None) -> Tensor:
    """This rank's part of what _gathered returned."""
    expected = list(parameter.shape)
    if cut is not None:
        expected[cut.dim] = cut.size
    if list(whole.shape) != expected:
        raise ValueError(
            f"{name} has shape {tuple(whole.shape)}, and this model's has "
            f"{tuple(expected)}: give the state of a model of the same sizes"
        )
    return whole if cut is None else cut.own(whole)
