"""The c10d operators in the field's words: which operation, how many bytes, which peer, which group."""

import torch
import torch.distributed as dist

# Operators of torch 2.13's c10d library and the names this course uses for them.
NAMES = {
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "broadcast_": "broadcast",
    "reduce_": "reduce",
    "allgather_": "all_gather",
    "_allgather_base_": "all_gather",
    "allgather_coalesced_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "reduce_scatter_": "reduce_scatter",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "alltoall_": "all_to_all",
    "alltoall_base_": "all_to_all",
    "gather_": "gather",
    "scatter_": "scatter",
    "send": "send",
    "recv_": "recv",
    "recv_any_source_": "recv",
    "barrier": "barrier",
    "monitored_barrier_": "barrier",
}
POINT_TO_POINT = ("send", "recv")
# The argument that holds what this rank puts in (for a recv: what it takes out).
_PAYLOAD = ("input_tensors", "input_tensor", "input", "inputs", "input_list", "tensors")
_OUT = ("output_tensors", "output")
_PEER = ("dst", "src", "root_rank")


def arguments(operator, args: tuple, kwargs: dict) -> dict:
    """The call's arguments by name; those left out take the schema's default."""
    schema = operator._schema.arguments
    named = {a.name: a.default_value for a in schema if a.has_default_value()}
    return named | dict(zip((a.name for a in schema), args, strict=False)) | kwargs


def payload(op: str, named: dict) -> tuple[int, str]:
    """Bytes of the tensors this rank puts in, and their dtype ("" where there is no tensor)."""
    if op == "barrier":
        return 0, ""
    tensors = list(flat(next((named[key] for key in _PAYLOAD if key in named), ())))
    dtype = str(tensors[0].dtype).removeprefix("torch.") if tensors else ""
    return sum(t.numel() * t.element_size() for t in tensors), dtype


def parts(named: dict) -> tuple[int, ...]:
    """Bytes of an all_to_all's input for each rank of the group, in the group's order."""
    if "input_tensors" in named:
        return tuple(t.numel() * t.element_size() for t in named["input_tensors"])
    tensor, splits = named["input"], named["input_split_sizes"]
    size = tensor.numel() * tensor.element_size()
    if not splits:
        n = group_of(named).size()
        return (size // n,) * n
    return tuple(size * split // max(1, sum(splits)) for split in splits)


def received(named: dict) -> int:
    """Bytes of an all_to_all's output, with what a rank sends to itself."""
    return sum(t.numel() * t.element_size() for t in flat([named[key] for key in _OUT if key in named]))


def group_of(named: dict) -> dist.ProcessGroup:
    """The process group of a call."""
    return dist.ProcessGroup.unbox(named["process_group"])


def peer_of(named: dict, ranks: tuple[int, ...]) -> int | None:
    """The global rank of the other side of a message, or of the root; None where there is none.

    Raises ValueError for a rank that the group does not have.
    """
    local = next((named[key] for key in _PEER if key in named), None)
    if local is None or local < 0:
        return None
    if local >= len(ranks):
        raise ValueError(f"rank {local} is not in this group of {len(ranks)} ranks, which are {', '.join(map(str, ranks))}")
    return ranks[local]


def work_of(result) -> dist.Work | None:
    """The Work in an operator's result: boxed alone or as the last of a tuple."""
    boxed = result[-1] if isinstance(result, tuple) else result
    return dist.Work.unbox(boxed) if isinstance(boxed, torch.ScriptObject) else None


def flat(value):
    """All tensors in a value, in lists of lists too."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from flat(item)
