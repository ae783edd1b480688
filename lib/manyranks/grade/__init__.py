"""Floor 5: the checks that exercises call: numerics, traffic, memory and order.

grade.collectives.ring_reduce_scatter(ring_reduce_scatter) runs a learner's function on real ranks and returns a Report.
Imports are lazy (PEP 562): every rank of a check imports this package for its script.
"""

import os

from manyranks import lazy

os.environ.setdefault("TRITON_INTERPRET", "1")  # kernels are judged where their bytes can be counted; Triton chooses once

lazy.require("torch", "numpy", "cloudpickle", "psutil", "msgspec")

__getattr__, __dir__, __all__ = lazy.names(__name__, __file__)
