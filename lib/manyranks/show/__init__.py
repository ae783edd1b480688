"""Floor 5: plots (data in, Figure out), the explorers around them, and tables of theory next to measurement."""

from manyranks import lazy

lazy.require("matplotlib", "ipywidgets")

__getattr__, __dir__, __all__ = lazy.names(__name__, __file__)
