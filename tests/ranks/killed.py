"""python -m tests.ranks.killed: the trainer, but one rank kills itself in step 3. A later start finds KILLED."""

import os
import signal
from pathlib import Path

from manyranks.training.__main__ import main
from manyranks.training.trainer import Trainer

trains = Trainer._train


def trains_or_dies(trainer, tokens_BT):
    if trainer.step == 2:
        try:
            Path(os.environ["KILLED"]).touch(exist_ok=False)
        except FileExistsError:
            return trains(trainer, tokens_BT)
        os.kill(os.getpid(), signal.SIGKILL)
    return trains(trainer, tokens_BT)


if __name__ == "__main__":
    Trainer._train = trains_or_dies
    main()
