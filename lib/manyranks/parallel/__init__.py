"""Floor 3: the techniques, a file or a package each, in plain torch.distributed.

Each also runs under torchrun. Its main names are here, too: `manyranks.parallel.Zero3`.
Imports are lazy (PEP 562): each loads its technique only.
"""

from manyranks import lazy, older_pytorch  # noqa: F401

__getattr__, __dir__, __all__ = lazy.names(__name__, __file__)
