"""Chapter 10: all axes at once. Meshes, tokens per GPU, plans and regimes, a small twin; the plan board."""

from manyranks.show.nd.explorer import explorer
from manyranks.show.nd.meshes import groups, mesh
from manyranks.show.nd.plans import layouts, plans, regimes, twin
from manyranks.show.nd.tokens import tokens

__all__ = ["explorer", "groups", "layouts", "mesh", "plans", "regimes", "tokens", "twin"]
