"""What was ready, the library's pipeline or PyTorch's, is refused: calls of it raise Stopped."""

from functools import partial

from manyranks.grade.refused import refused as refused_modules

READY = ("manyranks.parallel.pipeline", "manyranks.theory.pipeline", "torch.distributed.pipelining")
YOURSELF = "write it yourself: the text above says all that it needs"

# Inside, a function of these modules raises Stopped when it is called.
refused = partial(refused_modules, READY, YOURSELF)
