"""Expert parallelism: what is sent, how full ranks are, what imbalance costs, and what a rank holds.

sends: every all-to-all from the routing itself; chances: copies on average, where the router chooses at random; load: counts,
imbalance, capacity, and the states of a rank.
"""

from manyranks import lazy

__getattr__, __dir__, __all__ = lazy.names(__name__, __file__)
