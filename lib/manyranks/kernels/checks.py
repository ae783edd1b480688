"""Checks the arguments of every launcher: a kernel with wrong arguments reads memory it doesn't own."""

import torch

from manyranks.measure.interpreter import INTERPRETED

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def same(dtypes: tuple[torch.dtype, ...] = DTYPES, /, **tensors: torch.Tensor) -> None:
    """Raises ValueError unless all are tensors of one dtype, one of `dtypes`, on one device."""
    first_name, first = next(iter(tensors.items()))
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            raise ValueError(f"{name} is a {type(tensor).__name__}: give a tensor")
        if tensor.dtype not in dtypes:
            raise ValueError(f"{name} is {tensor.dtype}: the kernel takes {', '.join(map(str, dtypes))}")
        if not INTERPRETED and (tensor.device.type != "cuda" or tensor.device.index != torch.cuda.current_device()):
            raise ValueError(
                f"{name} is on {tensor.device}, and kernels run on cuda:{torch.cuda.current_device()}: move it there, "
                "choose another GPU with torch.cuda.set_device, or start Python with TRITON_INTERPRET=1"
            )
        if (tensor.dtype, tensor.device) != (first.dtype, first.device):
            raise ValueError(
                f"{name} is {tensor.dtype} on {tensor.device}, and {first_name} {first.dtype} on {first.device}: "
                "give both the same dtype and device"
            )


def shape(name: str, tensor: torch.Tensor, *expected: int | None) -> None:
    """Raises ValueError unless the tensor has these sizes. None stands for any size."""
    fits = len(tensor.shape) == len(expected) and all(
        size in (wanted, None) or wanted is None for size, wanted in zip(tensor.shape, expected, strict=True)
    )
    if not fits:
        wanted = " × ".join("any" if size is None else str(size) for size in expected)
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}: give {wanted}")


def block(least: int = 16, /, **sizes: int) -> None:
    """Raises ValueError unless each is a power of two, as Triton's blocks are, and at least `least`."""
    for name, size in sizes.items():
        if not isinstance(size, int) or size < least or size & (size - 1):
            raise ValueError(f"{name}={size!r}: give a power of two, {least} or more")


def grid(*programs: int) -> tuple[int, ...]:
    """Returns the grid. Raises ValueError for more programs along its second axis than a GPU takes."""
    if len(programs) > 1 and programs[1] > 65_535:
        raise ValueError(f"a grid of {programs}: a GPU takes at most 65,535 along the second axis; take larger tiles")
    return programs
