"""Pipeline parallelism: schedules as data, verified, replayed and run.

Imports are lazy (PEP 562): schedules brings in no torch.
"""

from manyranks import lazy

__getattr__, __dir__, __all__ = lazy.names(__name__, __file__)
