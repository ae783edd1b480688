"""Wrong answers to merge of 07_context."""

import math
from functools import reduce

import torch

from manyranks.parallel.context import blockwise
from tests.grading.zoo.context_right import merged
from tests.grading.zoo.wrong import Wrong, keeper

ZOO: list[Wrong] = []
wrong = keeper(ZOO)
TASK = "merge"


def stacked(parts):
    return torch.stack([o for o, _ in parts]), torch.stack([lse for _, lse in parts])


def weighted(weights, o):
    return (weights[..., None] * o).sum(0) / weights.sum(0)[..., None]


@wrong(TASK, "merge returned a NoneType; hint: it returns one pair, (o_SBAD, lse_SBA)")
def returns_nothing(parts):
    pass


@wrong(TASK, "merge returned a tensor, [5, 2, 3, 4] of float64")
def returns_o_only(parts):
    return merged(parts)[0]


@wrong(TASK, "o has the shape [5, 2, 3]; right is [5, 2, 3, 4]")
def returns_lse_first(parts):
    return merged(parts)[::-1]


@wrong(TASK, "that is the first part: the others are missing")
def takes_the_first(parts):
    return parts[0]


@wrong(TASK, "that is the last part: the others are missing")
def takes_the_last(parts):
    return parts[-1]


@wrong(TASK, "take the largest lse off before exp", right_values=True)
def without_the_maximum(parts):
    o, lse = stacked(parts)
    weights = lse.exp()
    return weighted(weights, o).nan_to_num(0) if lse.isinf().any() else weighted(weights, o), weights.sum(0).log()


@wrong(TASK, "take the largest lse off before exp", right_values=True)
def without_the_maximum_for_lse(parts):
    return merged(parts)[0], stacked(parts)[1].exp().sum(0).log()


@wrong(TASK, "the largest lse is that of each query and head, not of all", right_values=True)
def one_maximum_for_all(parts):
    o, lse = stacked(parts)
    most = max(lse.max() for _, lse in parts)
    weights = (lse - most).exp()
    total = weights.sum(0)
    return (weights[..., None] * o).sum(0) / total.clamp(min=1e-300)[..., None], most + total.log()


@wrong(TASK, "the largest lse is that of each query and head, not of all", right_values=True)
def one_maximum_for_all_outputs(parts):
    o, lse = stacked(parts)
    weights = (lse - lse.max()).exp()
    return weighted(weights, o).nan_to_num(0), lse.logsumexp(0)


@wrong(TASK, "−∞ − (−∞) is NaN", right_values=True)
def of_nothing_is_nan(parts):
    o, lse = stacked(parts)
    most = lse.amax(0)
    weights = (lse - most).exp()
    return weighted(weights, o), most + weights.sum(0).log()


@wrong(TASK, "−∞ − (−∞) is NaN", right_values=True)
def softmax_over_parts(parts):
    o, lse = stacked(parts)
    return (lse.softmax(0)[..., None] * o).sum(0), lse.logsumexp(0)


@wrong(TASK, "−∞ − (−∞) is NaN", right_values=True)
def by_the_chapters_sigmoid(parts):
    o, lse = parts[0]
    for other, its in parts[1:]:
        o = o - torch.sigmoid(its - lse)[..., None] * (o - other)
        lse = torch.logaddexp(lse, its)
    return o, lse


@wrong(TASK, "where no part has a key, o is 0", right_values=True)
def keeps_what_nobody_saw(parts):
    o, lse = merged(parts)
    return torch.where(lse[..., None] > -math.inf, o, parts[0][0]), lse


@wrong(TASK, "where no part has a key, o is 0", right_values=True)
def returns_a_single_part_as_it_is(parts):
    return merged(parts) if len(parts) > 1 else (parts[0][0].clone(), parts[0][1].clone())


@wrong(TASK, "where no part has a key, lse is −∞", right_values=True)
def largest_negative_for_minus_infinity(parts):
    o, lse = stacked(parts)
    lse = lse.nan_to_num()
    return weighted(lse.softmax(0), o), lse.logsumexp(0)


@wrong(TASK, "where no part has a key, lse is −∞", right_values=True)
def least_for_minus_infinity(parts):
    return merged([(o, lse.clamp(min=-1e4)) for o, lse in parts])


@wrong(TASK, "where no part has a key, lse is −∞", right_values=True)
def finite_lse(parts):
    o, lse = merged(parts)
    return o, lse.nan_to_num()


@wrong(TASK, "where no part has a key, lse is −∞", right_values=True)
def zero_for_minus_infinity(parts):
    o, lse = merged(parts)
    return o, lse.clamp(min=-1e4).where(lse > -math.inf, torch.zeros(()).double())


@wrong(TASK, "a part with lse = −∞ has the weight 0", right_values=True)
def weighs_what_was_not_seen(parts):
    o, lse = merged(parts)
    return merged([(one, its.clamp(min=0)) for one, its in parts])[0] if lse.isinf().any() else o, lse


@wrong(TASK, "that is the mean of the outputs")
def mean_of_outputs(parts):
    return stacked(parts)[0].mean(0), merged(parts)[1]


@wrong(TASK, "that is the sum of the outputs")
def sum_of_outputs(parts):
    return stacked(parts)[0].sum(0), merged(parts)[1]


@wrong(TASK, "Divide by the sum of all parts' exp(lse)")
def does_not_divide(parts):
    o, lse = stacked(parts)
    weights = (lse - lse.amax(0).clamp(min=-1e300)).exp()
    return (weights[..., None] * o).sum(0), merged(parts)[1]


@wrong(TASK, "the weights are lse itself")
def weighs_by_lse(parts):
    o, lse = stacked(parts)
    return weighted(lse, o), merged(parts)[1]


@wrong(TASK, "the weights are swapped")
def swaps_weights(parts):
    others = [lse for _, lse in parts][::-1]
    return merged([(o, lse) for (o, _), lse in zip(parts, others, strict=True)])[0], merged(parts)[1]


@wrong(TASK, "that is base 2")
def base_two(parts):
    o, lse = stacked(parts)
    most = lse.amax(0).clamp(min=-1e300)
    weights = (lse - most).exp2()
    return weighted(weights, o), most + weights.sum(0).log2()


@wrong(TASK, "that is base 2")
def lse_in_base_two(parts):
    o, lse = merged(parts)
    return o, lse / math.log(2)


@wrong(TASK, "that lse is a mean")
def mean_of_lse(parts):
    return merged(parts)[0], stacked(parts)[1].mean(0)


@wrong(TASK, "that lse is the largest one")
def largest_lse(parts):
    return merged(parts)[0], stacked(parts)[1].amax(0)


@wrong(TASK, "the sum of logarithms, which is the logarithm of a product")
def sum_of_lse(parts):
    return merged(parts)[0], stacked(parts)[1].sum(0)


@wrong(TASK, "that lse is the first part's")
def lse_of_the_first(parts):
    return merged(parts)[0], parts[0][1]


@wrong(TASK, "lse lacks what was taken off before exp")
def forgets_to_add_the_maximum(parts):
    lse = stacked(parts)[1]
    return merged(parts)[0], (lse - lse.amax(0)).exp().sum(0).log()


@wrong(TASK, "the third one is merged with the first one's lse")
def does_not_update_lse(parts):
    o, lse = parts[0]
    for other, its in parts[1:]:
        o = merged([(o, lse), (other, its)])[0]
    return o, merged(parts)[1]


@wrong(TASK, "there may be one part, two, or more")
def merges_two(parts):
    return merged(parts[:2])


@wrong(TASK, "o of part 0 changed; hint: leave what you are given as it is")
def adds_in_place(parts):
    o, lse = merged(parts)
    parts[0][0].copy_(o)
    return parts[0][0], lse


@wrong(TASK, "float64 has to stay float64")
def in_single_precision(parts):
    return tuple(one.float().double() for one in merged([(o.float(), lse.float()) for o, lse in parts]))


@wrong(TASK, "lse[..., None] has a place for D")
def forgets_the_last_dimension(parts):
    o, lse = stacked(parts)
    weights = lse.softmax(0)
    return (weights * o).sum(0), lse.logsumexp(0)


@wrong(TASK, "manyranks.parallel.context.merge is not allowed; hint: write it yourself")
def by_the_chapter(parts):
    hidden = [blockwise.merge]
    return reduce(lambda a, b: hidden[0](*a, *b), parts)
