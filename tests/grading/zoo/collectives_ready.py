"""Wrong answers to 01_collectives that call what is ready, the chapter's or the backend's."""

import torch
import torch.distributed as dist

from manyranks.parallel import collectives
from tests.grading.zoo.wrong import Wrong, keeper, me, placed

ZOO: list[Wrong] = []
wrong = keeper(ZOO)
SAID = "manyranks.parallel.collectives.{} is not allowed; hint: write it yourself, with dist.send, recv, {}collectives_ready.py"
HOW = "isend, irecv or batch_isend_irecv ("


@wrong("tree_broadcast", SAID.format("tree_broadcast", HOW))
def broadcast_by_the_chapter(x, root):
    return collectives.tree_broadcast(x.clone(), root)


@wrong("ring_all_gather", SAID.format("ring_all_gather", HOW))
def gather_by_the_chapter(shard, elements):
    return collectives.ring_all_gather(shard, elements=elements)


@wrong("ring_reduce_scatter", SAID.format("ring_reduce_scatter", HOW))
def scatter_by_the_chapter(x):
    return collectives.ring_reduce_scatter(x)


@wrong("ring_all_reduce", SAID.format("ring_all_reduce", HOW))
def reduce_by_the_chapter(x):
    return collectives.ring_all_reduce(x.clone()) / me()[1]


@wrong("ring_all_reduce", SAID.format("ring_reduce_scatter", HOW))
def reduce_by_an_inner_module_that_it_imports(x):
    from manyranks.parallel.collectives.ring import ring_all_gather, ring_reduce_scatter

    return ring_all_gather(ring_reduce_scatter(x) / me()[1], elements=len(x))


@wrong("pairwise_all_to_all", SAID.format("pairwise_all_to_all", HOW))
def swap_by_the_chapter(x):
    return collectives.pairwise_all_to_all(x)


@wrong("ring_all_gather", f"rank 0 called all_gather; hint: write it with dist.send, recv, {HOW}collectives_ready.py, line ")
def gather_by_the_backend_into_chunks_that_are_not_alike(shard, elements):
    parts = [torch.empty_like(chunk) for chunk in placed(shard, elements).tensor_split(me()[1])]
    dist.all_gather(parts, shard)
    return torch.cat(parts)
