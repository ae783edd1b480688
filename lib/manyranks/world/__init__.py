"""Floor 2: ranks from a notebook. `World` starts processes, runs functions on them and explains what went wrong.

Read from the bottom up: `processes.forkserver` has imported torch and forks each rank; `rank.process` is a rank's life, and
`rank.watch` its second thread, which answers "where are you?"; `processes.local` is the kernel's handle on these processes
(with engine="ray", `processes.ray_engine` takes its place, and `processes.ray_nodes` forks the ranks on each node); `collect`
waits for replies and notices trouble; `processes.team` starts a world's ranks together and ends them together;
`rank.messages` carries what they are told and answer, and `rank.tasks` is what a %%ranks cell becomes there;
`faults.deadlock` proves from the ranks' calls that they would wait forever;
`faults.diagnose` puts the trouble into words; `world` is what a reader calls. Ranks that run code of strangers:
`fences.confine` fences them, and `rank.plain` reads nothing but data from them.

"Kernel" means the notebook's process here, not the operating system's.
"""

from manyranks import lazy

lazy.require("torch", "numpy", "cloudpickle", "psutil", "msgspec")

# The forkserver and the ranks import their part of this package without the kernel's.
__getattr__, __dir__, __all__ = lazy.names(__name__, __file__)
