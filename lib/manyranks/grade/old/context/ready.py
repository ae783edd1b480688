"""What was ready, the library's or PyTorch's, all-to-alls with a way back among it, is refused: calls of it raise Stopped."""

from functools import partial

from manyranks.grade.old.refused import refused
from manyranks.grade.old.tensor import ready

READY = (*ready.READY, "torch.distributed.nn", "torch.distributed._functional_collectives")
YOURSELF = (
    "what is ready is no answer: call dist.all_to_all_single or dist.all_to_all yourself, in a torch.autograd.Function whose "
    "backward sends the gradients back"
)

# Inside, the learner's function runs; for tasks that make no call of dist's.
own = partial(
    refused, ("manyranks.parallel", "manyranks.grade.old.context"), "write it yourself: the text above says all that it needs"
)
