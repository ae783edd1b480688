"""Tensors that a learner's code made against those that are right, in words."""

import torch

from manyranks.grade.old.report import size


def same(got: torch.Tensor, right: torch.Tensor, tolerance: float = 1e-5) -> bool:
    """Whether they have the same shape, dtype and, nearly, values."""
    if got.shape != right.shape or got.dtype != right.dtype:
        return False
    return torch.equal(got, right) or torch.allclose(got, right, rtol=tolerance, atol=tolerance)


def difference(got: torch.Tensor, right: torch.Tensor, tolerance: float = 1e-5) -> str:
    """How many elements are wrong, and the first of them; for tensors of one shape."""
    wrong = ~torch.isclose(got, right, rtol=tolerance, atol=tolerance).flatten()
    first = int(wrong.nonzero()[0])
    there, here = _distinct(got.flatten()[first].item(), right.flatten()[first].item())
    return f"{int(wrong.sum()):,} of {wrong.numel():,} elements are wrong; element {first} is {there}, right is {here}"


def _distinct(first: float, second: float) -> tuple[str, str]:
    """Both numbers, with as many digits as tell them apart."""
    short = f"{first:g}", f"{second:g}"
    return short if short[0] != short[1] else (f"{first:.15g}", f"{second:.15g}")


def form(tensor: torch.Tensor) -> str:
    """Shape and dtype: "[7] of float32"."""
    return f"{list(tensor.shape)} of {str(tensor.dtype).removeprefix('torch.')}"


def sizes(first: int, second: int) -> tuple[str, str]:
    """Both in short, or to the byte where they would read the same."""
    short = size(first), size(second)
    return short if short[0] != short[1] else (f"{first:,} bytes", f"{second:,} bytes")
