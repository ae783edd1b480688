"""Floor 2: ranks from a notebook. `World` starts processes, runs functions on them and explains what went wrong.

"The notebook" is also the process that has made the World. These are its parts; each imports only from those below it.

    magic       runs a %%ranks cell on the newest open world
    world       is World: it sends a task to the ranks, waits for them, and judges what came of it
    collect     waits for the ranks' replies, and notices trouble at once
    notebook    shows a run: what ranks print (output), what each is doing (live), a rank's debugger (prompt)
    strangers   is for judges: reads what was handed in, and says why a run of it did not end well
    faults      proves that ranks would wait forever (deadlock), and puts any trouble into words (diagnose)
    counted     turns the ranks' recordings into what `measure` returns
    processes   starts and ends a world's ranks (Team), each by its handle; forks them (forkserver, local) or asks Ray (ray_…)
    rank        is a rank's life (process), what reaches it (messages, tasks), its reply, and where it says it is (watch)
    fences      stand around ranks that run code of strangers, which send nothing but data (rank.plain)
    cells       name a place in the notebook: "cell 12, line 4"
    limits      check what a World is asked for
    errors      are what a World raises

A cell goes from `magic` through `World` to each process of its `Team`, and there from `rank.process` to `rank.tasks`.
`collect` waits for the replies; if something went wrong, `faults.diagnose` makes the error that `World` raises.
"""

from manyranks import lazy

lazy.require("torch", "numpy", "cloudpickle", "psutil", "msgspec")

# The forkserver and the ranks import their part of this package without the notebook's.
__getattr__, __dir__, __all__ = lazy.names(__name__, __file__)
