"""Pipeline parallelism: schedules as data, verified, replayed and run.

    schedules           the algorithm: what each rank does, in order; the known schedules
    verify              a proof that a schedule can run, and what it holds
    program             a schedule in time, on the virtual clock
    paced               a schedule in time, on ranks that sleep
    split               a model cut into stages
    runtime             a schedule run on ranks, with real gradients
    mailbox             its messages
    split_backward      a backward in two halves, for zero-bubble schedules
    dualpipe            a schedule from both ends
    automatic           the best schedule that can be found
    all_to_all_overlap  1F1B with experts' all-to-alls beside compute

Imports are lazy (PEP 562): schedules brings in no torch.
"""

from manyranks import lazy

__getattr__, __dir__, __all__ = lazy.names(__name__, __file__)
