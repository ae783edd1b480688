"""What was ready, the library's or PyTorch's, is refused: calls of it raise Stopped."""

READY = ("manyranks.parallel", "torch.distributed.tensor")
YOURSELF = "write it yourself: the text above says all that it needs"
