"""Other people's runs: what papers and public repositories measured, and how far off theory is. rows reads their tables."""

from manyranks import lazy
from manyranks.theory.tables import rows as rows

__getattr__, __dir__, __all__ = lazy.names(__name__, __file__)
