"""Floor 3: the techniques, one file each, in plain torch.distributed.

Each also runs under torchrun. Its main names are here, too: `manyranks.parallel.Zero3`.
Imports are lazy (PEP 562): each loads its technique only.
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
    DataParallel="data_parallel",
    OverlappedDataParallel="data_parallel",
    ZeroOptimizer="zero",
    Zero3="zero",
    FullyShardedDataParallel="fsdp",
    checkpoint="checkpointing",
    checkpoint_modules="checkpointing",
    Pipeline="pipeline.runtime",
    parallelize="tensor",
    ContextParallel="context",
    ExpertParallel="expert",
    Mesh="mesh",
)
