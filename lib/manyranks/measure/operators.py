"""The c10d operators in the field's words: which operation, how many bytes, which peer, which group."""

import torch
import torch.distributed as dist

from manyranks.measure.flops import tensors_in

# Operators of torch 2.13's c10d library and the names this course uses for them.
_KINDS = {
    "all_reduce": "allreduce_ allreduce_coalesced_",
    "broadcast": "broadcast_",
    "reduce": "reduce_",
    "all_gather": "allgather_ _allgather_base_ allgather_coalesced_ allgather_into_tensor_coalesced_",
    "reduce_scatter": "reduce_scatter_ _reduce_scatter_base_ reduce_scatter_tensor_coalesced_",
    "all_to_all": "alltoall_ alltoall_base_",
    "gather": "gather_",
    "scatter": "scatter_",
    "send": "send",
    "recv": "recv_ recv_any_source_",
    "barrier": "barrier monitored_barrier_",
}
NAMES = {operator: name for name, operators in _KINDS.items() for operator in operators.split()}
POINT_TO_POINT = ("send", "recv")
# The argument that holds what this rank puts in (for a recv: what it takes out).
_PAYLOAD = ("input_tensors", "input_tensor", "input", "inputs", "input_list", "tensors")


def arguments(operator, args: tuple, kwargs: dict) -> dict:
    """Names the call's arguments; those left out take the schema's default."""
    schema = operator._schema.arguments
    named = {a.name: a.default_value for a in schema if a.has_default_value()}
    return named | dict(zip((a.name for a in schema), args, strict=False)) | kwargs


def payload(op: str, named: dict) -> tuple[int, str]:
    """Counts the bytes of the tensors this rank puts in, and their dtype ("" where there is no tensor)."""
    if op == "barrier":
        return 0, ""
    tensors = tensors_in(next((named[key] for key in _PAYLOAD if key in named), ()))
    dtype = str(tensors[0].dtype).removeprefix("torch.") if tensors else ""
    return sum(t.nbytes for t in tensors), dtype


def parts(named: dict) -> tuple[int, ...]:
    """Counts the bytes of an all_to_all's input for each rank of the group, in the group's order."""
    if "input_tensors" in named:
        return tuple(t.nbytes for t in named["input_tensors"])
    size, splits = named["input"].nbytes, named["input_split_sizes"] or (1,) * group_of(named).size()
    return tuple(size * split // max(1, sum(splits)) for split in splits)


def received(named: dict) -> int:
    """Counts the bytes of an all_to_all's output, with what a rank sends to itself."""
    return sum(t.nbytes for t in tensors_in([named[key] for key in ("output_tensors", "output") if key in named]))


def group_of(named: dict) -> dist.ProcessGroup:
    """Finds the process group of a call."""
    return dist.ProcessGroup.unbox(named["process_group"])


def peer_of(named: dict, ranks: tuple[int, ...]) -> int | None:
    """Finds the global rank of the other side of a message, or of the root; None where there is none.

    Raises ValueError for a rank that the group does not have.
    """
    local = next((named[key] for key in ("dst", "src", "root_rank") if key in named), None)
    if local is None or local < 0:
        return None
    if local >= len(ranks):
        raise ValueError(f"rank {local} is not in this group of {len(ranks)} ranks, which are {', '.join(map(str, ranks))}")
    return ranks[local]


def work_of(result) -> dist.Work | None:
    """Finds the Work in an operator's result: boxed alone or as the last of a tuple."""
    boxed = result[-1] if isinstance(result, tuple) else result
    return dist.Work.unbox(boxed) if isinstance(boxed, torch.ScriptObject) else None
