"""All axes at once: what a rank of a composed run holds and sends, and plans scaled down to a few ranks.

holds: a rank's parameters, tensor by tensor, and bytes of its states; sends: bytes and calls by axis; twin: a plan for
thousands of accelerators on as many ranks as a laptop has.

About what a plan should be: tokens and formulas: the fewest tokens per GPU that let an axis hide its communication;
rules: the lectures' rules of thumb next to the planner; verdict: can a plan be at all.
"""

from manyranks import lazy
from manyranks.theory.nd.holds import of_rank
from manyranks.theory.nd.sends import calls, payload
from manyranks.theory.nd.twin import Twin, twin
from manyranks.theory.nd.verdict import check

# Other modules are loaded when they are first used, for they need the tables of models and clusters.
__getattr__, __dir__, _ = lazy.names(__name__, __file__)
__all__ = ["Twin", "calls", "check", "formulas", "of_rank", "payload", "rules", "tokens", "twin"]
