"""Wrong answers to the second task of 02_data_parallel: gradients' mean over the examples of all ranks."""

import torch
import torch.distributed as dist

from tests.grading.zoo.gradients import fill, learning, total_of
from tests.grading.zoo.wrong import Wrong, keeper, me

ZOO: list[Wrong] = []
wrong = keeper(ZOO)


def reduce_all(tensors):
    for tensor in tensors:
        dist.all_reduce(tensor)


def average_all(tensors):
    for tensor in tensors:
        dist.all_reduce(tensor, op=dist.ReduceOp.AVG)


def weigh(model, share):
    fill(learning(model))
    for parameter in learning(model):
        parameter.grad *= share


def grads(model):
    return [parameter.grad for parameter in learning(model)]


@wrong("average", "nothing was sent")
def average_nothing(model, examples):
    pass


@wrong("average", "that is the sum of the ranks' gradients")
def average_by_the_sum(model, examples):
    weigh(model, 1)
    reduce_all(grads(model))


@wrong("average", "that is the mean over the ranks")
def average_over_ranks(model, examples):
    weigh(model, 1 / me()[1])
    reduce_all(grads(model))


@wrong("average", "that is divided by N twice")
def average_over_ranks_twice(model, examples):
    weigh(model, 1 / me()[1])
    reduce_all(grads(model))
    weigh(model, 1 / me()[1])


@wrong("average", "that is divided by N twice")
def average_and_divide_by_n_too(model, examples):
    weigh(model, examples / total_of(examples) / me()[1])
    reduce_all(grads(model))


@wrong("average", "the sum was divided by this rank's examples")
def average_by_its_own_examples(model, examples):
    weigh(model, examples)
    reduce_all(grads(model))
    weigh(model, 1 / examples)


@wrong("average", "the sum over the examples: divide by the examples of all ranks")
def average_without_dividing(model, examples):
    weigh(model, examples)
    reduce_all(grads(model))


@wrong("average", "that is the sum of the ranks' means over all examples")
def average_means_by_the_total(model, examples):
    weigh(model, 1 / total_of(examples))
    reduce_all(grads(model))


@wrong("average", "that is divided by N: divide by the examples of all ranks")
def average_examples_by_n(model, examples):
    weigh(model, examples / me()[1])
    reduce_all(grads(model))


@wrong("average", "is something left out where a gradient is None?")
def average_skipping_none(model, examples):
    total = total_of(examples)
    for parameter in learning(model):
        if parameter.grad is not None:
            parameter.grad *= examples / total
            dist.all_reduce(parameter.grad)


@wrong("average", "put the zeros into parameter.grad first")
def average_leaving_none(model, examples):
    total = total_of(examples)
    for parameter in learning(model):
        grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        grad *= examples / total
        dist.all_reduce(grad)


@wrong("average", "the gradients are to be averaged")
def average_weights(model, examples):
    total = total_of(examples)
    with torch.no_grad():
        for parameter in learning(model):
            parameter *= examples / total
            dist.all_reduce(parameter)


@wrong("average", "no mean has been written into parameter.grad")
def average_copies(model, examples):
    fill(learning(model))
    for grad in grads(model):
        grad = grad * (examples / total_of(examples))
        dist.all_reduce(grad)


@wrong("average", "one call for everything", right_values=True)
def average_in_one_call(model, examples):
    weigh(model, examples / total_of(examples))
    row = torch.cat([grad.flatten() for grad in grads(model)])
    dist.all_reduce(row)
    for grad, part in zip(grads(model), row.split([g.numel() for g in grads(model)]), strict=True):
        grad.copy_(part.view_as(grad))


@wrong("average", "async_op=True returns at once")
def average_and_wait_for_nothing(model, examples):
    weigh(model, examples / total_of(examples))
    for grad in grads(model):
        dist.all_reduce(grad, async_op=True)


@wrong("average", "frozen parameters have no gradient: leave them out", right_values=True)
def average_frozen_too(model, examples):
    fill(model.parameters())
    weigh(model, examples / total_of(examples))
    reduce_all([parameter.grad for parameter in model.parameters()])


@wrong("average", "a tied parameter has one gradient: parameters() gives it once", right_values=True)
def average_tied_twice(model, examples):
    total = total_of(examples)
    for _, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.requires_grad:
            fill([parameter])
            parameter.grad *= examples / total
            dist.all_reduce(parameter.grad)


@wrong("average", "nearly right, as if rounded: float64 has to stay float64")
def average_in_float32(model, examples):
    weigh(model, examples / total_of(examples))
    for grad in grads(model):
        small = grad.float()
        dist.all_reduce(small)
        grad.copy_(small)


@wrong("average", "called all_gather", right_values=True)
def average_by_all_gather(model, examples):
    weigh(model, examples / total_of(examples))
    for grad in grads(model):
        everyone = [torch.empty_like(grad) for _ in range(me()[1])]
        dist.all_gather(everyone, grad)
        grad.copy_(sum(everyone))


@wrong("average", "one small call is enough", right_values=True)
def average_asking_for_each_parameter(model, examples):
    fill(learning(model))
    for parameter in learning(model):
        parameter.grad *= examples / total_of(examples)
        dist.all_reduce(parameter.grad)


@wrong("average", "no rank knows how many examples the others have", right_values=True)
def average_guessing_the_others_examples(model, examples):
    weigh(model, examples / sum(2 + 3 * rank for rank in range(me()[1])))
    reduce_all(grads(model))


@wrong("average", "all ranks must make the same calls in the same order (average.py, line")
def average_in_another_order_on_each_rank(model, examples):
    weigh(model, examples / total_of(examples))
    reduce_all(grads(model)[:: 1 if me()[0] else -1])


@wrong("average", "nothing was sent")
def average_locally(model, examples):
    from manyranks.grade.old.data_parallel import toy

    n = me()[1]
    rows = [2 + 3 * rank for rank in range(n)]
    found = [toy.own(toy.Toy(0), [lambda m, r=r: toy.loss_of(m, r, 1, rows[r])]) for r in range(n)]
    right = toy.weighted(found, rows)[0]
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            parameter.grad = right[name]


@wrong("average", "rank 0 called broadcast; hint: the task needs all_reduce only")
def average_counting_wrongly(model, examples):
    total = torch.tensor([examples])
    dist.broadcast(total, 0)
    weigh(model, examples / total)
    reduce_all(grads(model))


@wrong("average", "divided by N twice: ReduceOp.AVG divides, too")
def average_by_avg_and_by_all_examples(model, examples):
    weigh(model, examples / total_of(examples))
    average_all(grads(model))


@wrong("average", "the examples of all ranks are their sum, not their mean")
def average_by_the_mean_number_of_examples(model, examples):
    total = torch.tensor([examples], dtype=torch.float64)
    average_all([total])
    weigh(model, examples / total)
    reduce_all(grads(model))


@wrong("average", "weigh before the all-reduce")
def average_weighing_the_sum(model, examples):
    weigh(model, 1)
    reduce_all(grads(model))
    weigh(model, examples / total_of(examples))


@wrong("average", "weigh before the all-reduce")
def average_weighing_the_mean(model, examples):
    weigh(model, 1)
    average_all(grads(model))
    weigh(model, examples / total_of(examples))


@wrong("average", "has a gradient of None there: make it zeros")
def average_multiplying_none(model, examples):
    for parameter in learning(model):
        parameter.grad *= examples


@wrong("average", "has a gradient of None there: make it zeros")
def average_sending_none(model, examples):
    for parameter in learning(model):
        dist.all_reduce(parameter.grad)
