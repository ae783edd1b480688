"""Wrong answers to the first task of 02_data_parallel: equal parameters and buffers."""

import torch
import torch.distributed as dist

from tests.grading.zoo.gradients import learning
from tests.grading.zoo.wrong import Wrong, keeper, me

ZOO: list[Wrong] = []
wrong = keeper(ZOO)


def all_of(model):
    return [*model.parameters(), *model.buffers()]


def send_all(tensors, src=0):
    with torch.no_grad():
        for tensor in tensors:
            dist.broadcast(tensor, src)


@wrong("replicate", "nothing was sent")
def replicate_nothing(model):
    pass


@wrong("replicate", "buffers belong to the model, too")
def replicate_without_buffers(model):
    send_all(model.parameters())


@wrong("replicate", "parameters belong to the model, too")
def replicate_buffers_only(model):
    send_all(model.buffers())


@wrong("replicate", "frozen parameters are used, too: broadcast all")
def replicate_without_frozen(model):
    send_all([*learning(model), *model.buffers()])


@wrong("replicate", "is a tied parameter sent twice?", right_values=True)
def replicate_the_state_dict(model):
    send_all(model.state_dict().values())


@wrong("replicate", "those of the last rank arrived: rank 0's are asked for")
def replicate_from_the_last_rank(model):
    send_all(all_of(model), me()[1] - 1)


@wrong("replicate", "with root 0 where rank 1 called broadcast of 18,816 bytes with root 1: all ranks must make the same")
def replicate_from_itself(model):
    send_all(all_of(model), me()[0])


@wrong("replicate", "rank 0's have to arrive in the model's own tensors")
def replicate_copies(model):
    for tensor in all_of(model):
        tensor = tensor.detach().clone()
        dist.broadcast(tensor, 0)


@wrong("replicate", "that is the mean over the ranks: rank 0's are asked for")
def replicate_the_mean(model):
    with torch.no_grad():
        for tensor in learning(model):
            dist.all_reduce(tensor)
            tensor /= me()[1]


@wrong("replicate", "has returned; all ranks must make the same calls in the same order")
def replicate_on_rank_0_only(model):
    if me()[0] == 0:
        send_all(all_of(model))


@wrong("replicate", "async_op=True returns at once")
def replicate_and_wait_for_nothing(model):
    with torch.no_grad():
        for tensor in all_of(model):
            dist.broadcast(tensor, 0, async_op=True)


@wrong("replicate", "nearly right, as if rounded: float64 has to stay float64")
def replicate_in_float32(model):
    with torch.no_grad():
        for tensor in all_of(model):
            half = tensor.float()
            dist.broadcast(half, 0)
            tensor.copy_(half)


@wrong("replicate", "rank 0 called send", right_values=True)
def replicate_by_messages(model):
    for tensor in all_of(model):
        for peer in range(1, me()[1]):
            if me()[0] == 0:
                dist.send(tensor.detach(), peer)
            elif me()[0] == peer:
                dist.recv(tensor.detach(), 0)


@wrong("replicate", "broadcast each parameter and each buffer, once", right_values=True)
def replicate_objects(model):
    box = [model.state_dict()]
    dist.broadcast_object_list(box, 0)
    model.load_state_dict(box[0])


@wrong("replicate", "rank 0 called all_gather; hint: the task needs broadcast only", right_values=True)
def replicate_by_all_gather(model):
    with torch.no_grad():
        for tensor in all_of(model):
            everyone = [torch.empty_like(tensor) for _ in range(me()[1])]
            dist.all_gather(everyone, tensor)
            tensor.copy_(everyone[0])


@wrong("replicate", "gave 8 bytes; hint: all ranks must make the same calls in the same order (replicate.py, line")
def replicate_in_another_order_on_each_rank(model):
    tensors = all_of(model)
    send_all(tensors if me()[0] == 0 else tensors[::-1])


@wrong("replicate", "change parameters under torch.no_grad()")
def replicate_without_no_grad(model):
    for tensor in all_of(model):
        first = tensor.detach().clone()
        dist.broadcast(first, 0)
        tensor.copy_(first)


@wrong("replicate", "everything was sent twice", right_values=True)
def replicate_twice(model):
    send_all(all_of(model))
    send_all(all_of(model))


@wrong("replicate", "nothing was sent")
def replicate_by_a_seed(model):
    torch.manual_seed(0)
    for layer in model.modules():
        if hasattr(layer, "reset_parameters"):
            layer.reset_parameters()


@wrong("replicate", "unexpected keyword argument 'root'; hint: replicate.py, line ")
def replicate_with_another_keyword(model):
    for tensor in all_of(model):
        dist.broadcast(tensor, root=0)


@wrong("replicate", "the check calls replicate(model)")
def replicate_with_another_argument(model, src):
    send_all(all_of(model), src)
