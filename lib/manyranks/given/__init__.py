"""Floor 4: what exercises hand out, and what their checks put learners' code into: models, stages, clusters, devices.

No answer is here, and nothing judges: that is `manyranks.grade`. A module has the name of its exercise's check; `disk`
belongs to `failures`.
"""

from manyranks import lazy

__getattr__, __dir__, __all__ = lazy.names(__name__, __file__)
