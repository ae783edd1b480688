"""Chapter 10: all axes at once. Meshes, tokens per GPU, plans and regimes, operator splits, a small twin; the plan board."""

from manyranks.show.nd_explorer import explorer
from manyranks.show.nd_layouts import layouts
from manyranks.show.nd_mesh import groups, mesh
from manyranks.show.nd_plans import plans
from manyranks.show.nd_splits import splits
from manyranks.show.nd_tables import regimes, twin
from manyranks.show.nd_tokens import tokens

__all__ = ["explorer", "groups", "layouts", "mesh", "plans", "regimes", "splits", "tokens", "twin"]
