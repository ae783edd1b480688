"""Prints of tensors with numbers that are not finite."""

import pytest
import torch

from manyranks.measure.fingerprints import difference, same

NONE, NAN = -torch.inf, torch.nan


def some(*others: float, n: int = 30) -> torch.Tensor:
    """Small numbers, and others in the first places."""
    numbers = torch.linspace(-2, 3, n, dtype=torch.float64)
    numbers[: len(others)] = torch.tensor(others, dtype=torch.float64)
    return numbers


@pytest.mark.parametrize("n", [9, 30, 500])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_what_is_infinite_hides_no_difference_of_the_others(n, dtype):
    right, wrong = some(NONE, NONE, n=n).to(dtype), some(NONE, NONE, n=n).to(dtype)
    assert same(right, right.clone())
    wrong[3:] += 0.05
    assert not same(wrong, right)
    assert "right is" in difference(wrong, right) or "are wrong" in difference(wrong, right)


@pytest.mark.parametrize("n", [9, 30])
@pytest.mark.parametrize("wrong", [(NONE, 1), (1, NONE), (NONE, NAN), (NONE, torch.inf), (NONE, -1e300), (NONE, NONE, NONE)])
def test_what_is_not_finite_is_so_in_the_same_places(n, wrong):
    assert not same(some(*wrong, n=n), some(NONE, NONE, n=n))


def test_nothing_but_what_is_not_finite_has_a_print_too():
    assert same(some(*[NONE] * 30), some(*[NONE] * 30))
    assert not same(some(*[NONE] * 30), some(*[NAN] * 30))
