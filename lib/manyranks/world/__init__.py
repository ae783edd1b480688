"""Floor 2: ranks from a notebook. `World` starts processes, runs functions on them and explains what went wrong.

Read from the bottom up: `forkserver` has imported torch and forks each rank; `rank` is a rank's life, and `watch` its second
thread, which answers "where are you?"; `local` is the kernel's handle on these processes (with engine="ray", `ray_engine` takes
its place, and `ray_nodes` forks the ranks on each node); `collect` waits for replies and notices trouble; `deadlock` proves
from the ranks' calls that they would wait forever; `diagnose` puts the trouble into words; `world` is what a reader calls.
Ranks that run code of strangers: `confine` fences them, and `plain` reads nothing but data from them.
"""

from manyranks import lazy

lazy.require("torch", "numpy", "cloudpickle", "psutil", "msgspec")

# The forkserver and the ranks import their part of this package without the kernel's.
__getattr__, __dir__, __all__ = lazy.names(__name__, __file__)
