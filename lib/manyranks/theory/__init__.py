"""Floor 1: what should happen. Bytes, seconds and FLOPs from formulas. Standard library only.

    inputs
      tables                                      what papers and public repositories print, a CSV file each
      shapes, architecture, hybrid, huggingface   models: sizes, and what follows from them
      hardware, cluster, kernels                  chips, links, and three constants for all estimates
      plan, stacks                                how a step is split, and a framework's way of doing that
    one step, in the order in which step.estimate asks
      stages, states         the layers of each rank, and its parameters
      compute, layer         seconds of one micro-batch, kernel by kernel
      communicate            seconds of collectives and messages: calls lists them, network times them
      pace, pipeline         a micro-batch and a step on each rank; bubbles
      data_parallel          gradients and parameters that nothing hides, and the optimizer
    of the same stages and states
      memory, activations    bytes that a rank holds
    built on a step
      planner, bounds        plans that fit, fastest first
      written                a plan in words, and as the commands of two frameworks
      roofline, flops        what the time goes to; MFU
      published              other people's runs: how far off the estimates are

And a chapter's own formulas: collectives, sharding, offloading, checkpointing (optimal_checkpoints, equal_checkpoints), tensor,
context, expert, nd, blocks, failures, batch.
"""

from manyranks import lazy

__getattr__, __dir__, __all__ = lazy.names(__name__, __file__)
