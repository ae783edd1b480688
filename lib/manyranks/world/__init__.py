"""Floor 2: ranks from a notebook. `World` starts processes, runs functions on them and explains what went wrong.

"The notebook" is also the process that has made the World. Here are the rooms; each takes only from those below it.

magic       %%ranks, which runs a cell on the newest open world
world       World, which a reader calls: sends a task to the ranks, waits, judges what came of it
collect     waits for the ranks' replies, and notices trouble at once
notebook    a run as a notebook shows it: what ranks print (output), what each is doing (live), a debugger's line (prompt)
strangers   runs of code that nobody here has written: what was handed in, and why a run did not end well
faults      the proof that ranks would wait forever (deadlock), and the trouble in words (diagnose)
counted     what `measure` returns
processes   Team starts a world's ranks together and ends them together (team); on this machine the forkserver, which has
            imported torch, forks each (forkserver, local); on a Ray cluster, one on each node does (ray_engine, ray_nodes)
rank        a rank's life (process), and its second thread, which answers "where are you?" (watch); what it's told and
            answers (messages, or plain: nothing but data), and what a %%ranks cell becomes there (tasks)
fences      around ranks that run code of strangers
cells       "cell 12, line 4", and the line itself
limits      what a World may be asked for
errors      what it raises

A cell goes from `magic` through `World` to each process of its `Team`, and there from `rank.process` to `rank.tasks`. `collect`
waits for the replies, and of what went wrong `faults.diagnose` makes the error that `World` raises.
"""

from manyranks import lazy

lazy.require("torch", "numpy", "cloudpickle", "psutil", "msgspec")

# The forkserver and the ranks import their part of this package without the notebook's.
__getattr__, __dir__, __all__ = lazy.names(__name__, __file__)
