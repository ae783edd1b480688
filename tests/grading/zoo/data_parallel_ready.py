"""Wrong answers to 02_data_parallel that call what is ready, the chapter's or PyTorch's."""

import torch.distributed as dist
from torch import nn

from manyranks.parallel.data_parallel import FlatDataParallel, NaiveDataParallel, OverlappedDataParallel
from tests.grading.zoo.gradients import fill, learning, row_of, total_of
from tests.grading.zoo.wrong import Wrong, keeper, me

ZOO: list[Wrong] = []
wrong = keeper(ZOO)
YOURSELF = "is not allowed; hint: write it yourself: the text above says all that it needs (data_parallel_ready.py, line "
CHAPTER = "manyranks.parallel.data_parallel"


@wrong("replicate", f"{CHAPTER}.NaiveDataParallel {YOURSELF}")
def replicate_by_the_chapter(model):
    NaiveDataParallel(model)


@wrong("replicate", f"torch.nn.parallel.DistributedDataParallel {YOURSELF}")
def replicate_by_torch(model):
    nn.parallel.DistributedDataParallel(model)


@wrong("replicate", f"torch.distributed.utils._sync_module_states {YOURSELF}")
def replicate_by_a_part_of_torchs(model):
    from torch.distributed.utils import _sync_module_states

    _sync_module_states(model, dist.group.WORLD, 2**20, 0, [])


@wrong("average", f"{CHAPTER}.NaiveDataParallel {YOURSELF}")
def average_by_the_chapter(model, examples):
    fill(learning(model))
    share = examples / total_of(examples) * me()[1]
    for parameter in learning(model):
        parameter.grad *= share
    NaiveDataParallel(model).finish()


@wrong("average", "functional collectives do not count here; hint: call dist's own")
def average_by_functional_collectives(model, examples):
    from torch.distributed import _functional_collectives as functional

    fill(learning(model))
    share = examples / total_of(examples)
    for parameter in learning(model):
        parameter.grad = functional.all_reduce(parameter.grad * share, "sum", dist.group.WORLD).clone()


@wrong("cut", f"_compute_bucket_assignment_by_size {YOURSELF}")
def cut_by_torch(parameters, first_bytes, cap_bytes):
    last_first = learning(nn.ParameterList(parameters))[::-1]
    numbers, _ = dist._compute_bucket_assignment_by_size(last_first, [int(first_bytes), int(cap_bytes)])
    return [[last_first[number] for number in bucket] for bucket in numbers]


@wrong("cut", f"manyranks.parallel.buckets.cut {YOURSELF}")
def cut_by_the_chapter(parameters, first_bytes, cap_bytes):
    from manyranks.parallel import buckets

    return buckets.cut(learning(nn.ParameterList(parameters)), cap_bytes)


@wrong("average_in_buckets", f"{CHAPTER}.FlatDataParallel {YOURSELF}")
def in_buckets_by_the_chapter(buckets):
    for bucket in buckets:
        FlatDataParallel(nn.ParameterList(bucket)).finish()


class Kin(NaiveDataParallel):
    pass


@wrong("average_in_buckets", f"{CHAPTER}.NaiveDataParallel {YOURSELF}")
def in_buckets_by_what_is_derived_from_the_chapters(buckets):
    for bucket in buckets:
        Kin(nn.ParameterList(bucket)).finish()


@wrong("average_in_buckets", f"torch.distributed.all_reduce_coalesced {YOURSELF}")
def in_buckets_by_the_backend(buckets):
    for bucket in buckets:
        row_of(bucket)
        dist.all_reduce_coalesced([parameter.grad for parameter in bucket])
        for parameter in bucket:
            parameter.grad /= me()[1]


@wrong("Overlapped", f"{CHAPTER}.OverlappedDataParallel {YOURSELF}")
class HidesTheChapters(nn.Module):
    def __init__(self, module, first_bytes, cap_bytes):
        super().__init__()
        self.hidden = [OverlappedDataParallel(module, bucket_bytes=cap_bytes)]

    def forward(self, *args):
        return self.hidden[0](*args)

    def finish(self):
        self.hidden[0].finish()
