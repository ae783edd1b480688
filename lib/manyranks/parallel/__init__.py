"""Floor 3: the techniques, one file each, in plain torch.distributed.

Each also runs under torchrun.
Imports are lazy (PEP 562): parallel.collectives loads that technique only.
"""

from manyranks import lazy, renamed  # noqa: F401

__getattr__, __dir__, __all__ = lazy.names(
    __name__,
    "boxes",
    "checkpoint_plan",
    "checkpointing",
    "collectives",
    "context",
    "data_parallel",
    "expert",
    "fsdp",
    "mesh",
    "offload",
    "pipeline",
    "precision",
    "recompute_policy",
    "sharded",
    "tensor",
    "tensor2d",
    "zero",
)
