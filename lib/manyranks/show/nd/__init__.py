"""Chapter 10: all axes at once. Meshes, tokens per GPU, plans and regimes, a small twin; the plan board."""

from manyranks.show.nd.explorer import explorer
from manyranks.show.nd.figures import groups, layouts, mesh, over_degrees, plans, regimes, tokens, twin

__all__ = ["explorer", "groups", "layouts", "mesh", "over_degrees", "plans", "regimes", "tokens", "twin"]
