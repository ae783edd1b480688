"""Floor 5: the checks that exercises call, and the judge whose points count.

grade.collectives.ring_reduce_scatter(ring_reduce_scatter) runs a learner's function on real ranks and returns a Report.

Who judges what, in which process:
- To learn, the notebook's process judges. It makes what each rank gets (`Task.make`); ranks run the task's script with the
  answer (`trial.run_script`); what they return is compared with records that the library has (data/).
- For points that count, `apart.Judge` runs solutions/ with a seed that nobody has seen; it never reads a submission. A process
  for each submission (`apart._Court`) does, and asks the Judge what is right. It takes the notebook and what comes from
  ranks as data, and runs no line of a learner's: cells and answers run on its confined ranks (`absent`).

A rank may know the script, the answer, the library, and what it gets itself. It may not know the seed, what other ranks get,
what is right, or the judge's records: no frame, closure, module or file there has them. So `make` and `then` run where the
judge is. What a rank sends may be forged: it is plain data of a limited size, a part that is missing or strange costs the
answer its points, and Linux's count of bytes has to agree with the calls that are noted.

Read in this order: start_here (one exercise), check (a Task, and its report), trial (ranks run it), judges, learner (what an
answer may not call, and how its errors read); measure.mistakes says why a report has its hint. Then, for points that count:
submission, absent, answers, apart, and who calls it: classroom, autograde.

Imports are lazy (PEP 562): every rank of a check imports this package for its script.
"""

import os

from manyranks import lazy

os.environ.setdefault("TRITON_INTERPRET", "1")  # kernels are judged where their bytes can be counted; Triton chooses once

lazy.require("torch", "numpy", "cloudpickle", "psutil", "msgspec")

__getattr__, __dir__, __all__ = lazy.names(__name__, __file__)
