"""The trainer: a plain loop over batches of the corpus, on one process or on ranks that share them.

B sequences   S tokens of each that are predicted   T = S + 1 tokens that it takes
"""

import contextlib
import math
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from manyranks.parallel.collectives.messages import Group
from manyranks.parallel.data_parallel import OverlappedDataParallel
from manyranks.parallel.mesh import Here
from manyranks.theory import failures
from manyranks.theory.published.failures import LLAMA3_GPU_MTBF
from manyranks.training import checkpoint, corpus, progress_line
from manyranks.training.checkpoint import Checkpoints
from manyranks.training.config import GPTConfig, TrainingConfig
from manyranks.training.gpt import GPT
from manyranks.training.parallelize import mesh_of, parallelize
from manyranks.training.runnable import check_plan
from manyranks.training.spread import Wrapper
from manyranks.training.utilization import Utilization, peak_of_ranks

_LOWEST = 0.1  # of the learning rate, at the end
_FIRST_SAVE = 10  # steps until it, where the run finds out itself how often to save


class Result(NamedTuple):
    """The results of a run, the same on every rank. Losses are in nats a byte."""

    losses: list[float]  # of each step's global batch, before the step
    held_out: float  # after the last step
    first: int  # step of losses[0], counted from 0: above it where the run was resumed
    seconds: float  # that the steps took, with their checkpoints
    parameters: int
    ranks: int
    utilization: Utilization | None = None  # where it was asked for
    every: int | None = None  # steps from one checkpoint to the next, as it was at the end


class Trainer:
    """A rank's part of a run: `.model`, wrapped, `.optimizer` and `.step`, the number done.

    With a training.plan it also has `.here`, this rank's place in the plan's mesh.

    wrapper: a class of parallel.data_parallel, used where there is a process group and
        training.zero is 0
    group: None for the default one
    dtype: of parameters, gradients and optimizer; None: what the plan's precision says, else
        float32

    Raises ValueError where the batch is too small for the ranks, the vocabulary for bytes, for
    experts that are to be balanced, for a group with a plan, and as check_plan and parallelize do.
    """

    def __init__(
        self,
        gpt: GPTConfig,
        training: TrainingConfig,
        wrapper: Wrapper = OverlappedDataParallel,
        group: Group = None,
        dtype: torch.dtype | None = None,
    ):
        if gpt.vocab < corpus.VOCAB:
            raise ValueError(f"vocab={gpt.vocab}: the corpus has {corpus.VOCAB} tokens, one a byte")
        if gpt.auxiliary or gpt.bias_speed:
            raise ValueError(
                f"auxiliary={gpt.auxiliary}, bias_speed={gpt.bias_speed}: the trainer adds no "
                "balancing loss and moves no biases; leave both 0, or train with "
                "parallel.expert.ExpertParallel"
            )
        self.gpt, self.training, self.group, self.step = gpt, training, group, 0
        self.rank, self.ranks, self.device = _place(group)
        self.here = _here(gpt, training, self.ranks, group, self.device)
        self._data = (self.rank, self.ranks)  # who takes which sequences of a batch
        self._sharers, self._draws = self.ranks, str(self.rank)
        if self.here:
            at, mesh = self.here.coordinates, self.here.mesh
            self._data = at["dp"], mesh.dp
            self._sharers = mesh.dp * mesh.cp
            self._draws = f"{at['dp']} of stage {at['pp']}"
        training.check_ranks(self._data[1])
        dtype = dtype or _dtype(training)
        self._precise = torch.promote_types(dtype, torch.float32)  # of losses
        self._check: Callable[[], None] = lambda: None
        model = GPT(gpt, training.seed).to(self.device, dtype)
        self.spread = parallelize(model, training, wrapper, group, self.here)
        self.model, self.optimizer = self.spread.model, self.spread.optimizer

    def run(
        self, steps: int | None = None, report: progress_line.Report | None = None
    ) -> list[float]:
        """Makes that many steps, or all that are left; returns the loss of each global batch.

        report: called after each step with the number done and the loss of this rank's part.
        """
        left = self.training.steps - self.step
        shares = []
        for _ in range(left if steps is None else steps):
            tokens_BT = corpus.batch(self.step, self.training.batch, self.gpt.seq, *self._data)
            shares.append(self._train(tokens_BT.to(self.device)))
            self.step += 1
            self._check()
            if report:
                cp = self.here.mesh.cp if self.here else 1
                report(self.step, shares[-1].item() * self.training.batch * cp / len(tokens_BT))
        return self._summed(shares)  # at the end: a step has no messages but the gradients'

    def evaluate(self, sequences: int = 256) -> float:
        """The mean loss on that many sequences, spread over the held-out text.

        Raises ValueError for fewer than 1, and with a plan for fewer than data-parallel ranks.
        """
        least = self._data[1] if self.here else 1
        if type(sequences) is not int or sequences < least:
            what = f"sequences={sequences!r} for {least} data-parallel ranks"
            raise ValueError(f"{what}, and each takes one or more: give {least} or more")
        tokens_BT = corpus.held_out(sequences, self.gpt.seq, *self._data).to(self.device)
        parts = -(-sequences // (self._data[1] * self.training.batch))  # the same on all ranks
        share, parts = (self._evaluated, 1) if self.spread.pipeline else (self._share, parts)
        self.model.eval()
        with torch.no_grad():
            shares = [share(part_BT, sequences) for part_BT in tokens_BT.tensor_split(parts)]
        self.model.train()
        return self._summed([torch.stack(shares).sum()])[0]

    def save(self, where: Path | str | Checkpoints) -> Path:
        """Writes a checkpoint, which all ranks call; returns its own folder.

        where: a folder, which has it when this returns; or Checkpoints, which write it beside the
            next steps
        """
        if isinstance(where, Checkpoints):
            self._check = where.check  # after each step: a full disk costs no second interval
            return where.save(self.spread, self.step, self._run)
        with Checkpoints(where, self.group) as checkpoints:
            return self.save(checkpoints)

    def resume(self, folder: Path | str) -> None:
        """Goes on from the folder's newest checkpoint, written by any ranks under any plan.

        Starts anew where there is none. Raises ValueError where it is of another run.
        """
        if place := checkpoint.newest(Path(folder), self.group):
            self.step = checkpoint.load(place, self.spread, self._run)

    @property
    def _run(self) -> str:
        """Returns what a run that goes on must share: weights, data and dropout follow from it."""
        training, text = self.training, len(corpus.text().train)
        return f"{self.gpt}, seed={training.seed}, batch={training.batch}, {text:,} bytes of text"

    @property
    def speaks(self) -> bool:
        """Returns whether this is the rank that shows progress: the first of those with a loss."""
        if self.here is None:
            return self.rank == 0
        stages, mesh = self.spread.pipeline, self.here.mesh
        last = stages.schedule.placement[-1] if stages else 0
        return self.rank == mesh.rank(pp=last)

    def _train(self, tokens_BT: Tensor) -> Tensor:
        """Takes a step on this rank's part of the batch; returns its share of the batch's loss."""
        if self.gpt.dropout:  # another mask each step and rank, and the same after a resume
            drawn = f"{self.training.seed} {self.step} {self._draws}"
            torch.manual_seed(zlib.crc32(drawn.encode()))
        through = self._stages if self.spread.pipeline else self._microbatches
        share = through(tokens_BT)
        self.spread.complete()
        self.spread.clip(self.training.clip)
        for settings in self.optimizer.param_groups:
            settings["lr"] = learning_rate(self.step, self.training)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return share

    def _microbatches(self, tokens_BT: Tensor) -> Tensor:
        """Runs forward and backward of one micro-batch after another."""
        parts = tokens_BT.tensor_split(self.training.accumulate)
        shares = []
        for i, part_BT in enumerate(parts):
            # Stage 3 reduces each micro-batch's gradients: it is not to hold them whole.
            reduces = i == len(parts) - 1 or self.training.zero == 3
            with contextlib.nullcontext() if reduces else self.model.no_sync():
                shares.append(self._share(part_BT, self.training.batch))
                # The ranks' parts may differ in size, so gradients are averaged as follows: a
                # rank's loss is its sum over tokens ÷ the tokens of the GLOBAL batch · ranks,
                # whose mean over the ranks is the mean over the global batch.
                (shares[-1] * self._sharers).backward()
                self.model.finish()
        return torch.stack(shares).sum().detach()

    def _stages(self, tokens_BT: Tensor) -> Tensor:
        """Runs forward and backward of all micro-batches, as the schedule says."""
        with self.model.no_sync():
            losses = self.spread.pipeline.step(*self._cut(tokens_BT))
        self.model.finish()
        return self._share_of_mean(losses, len(tokens_BT), self.training.batch)

    def _share(self, tokens_BT: Tensor, sequences: int) -> Tensor:
        """Returns what these add to the mean loss over all tokens of so many sequences."""
        inputs_BS, targets_BS = self._cut(tokens_BT)
        autocast = self.training.bf16 and self.training.zero < 3
        with torch.autocast(self.device.type, torch.bfloat16, enabled=autocast):
            total = self.spread.loss(self.model(inputs_BS), targets_BS)
        return total / (sequences * self.gpt.seq)

    def _share_of_mean(self, losses: Tensor | None, own: int, sequences: int) -> Tensor:
        """Does as _share, from micro-batches' parts of the own mean; 0 where others have these."""
        if losses is None:
            return torch.zeros((), dtype=self._precise, device=self.device)
        return losses.sum() * own / (sequences * self.here.mesh.cp)

    def _cut(self, tokens_BT: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs and targets: of all tokens, or of this rank's part of each sequence."""
        both = tokens_BT[:, :-1], tokens_BT[:, 1:]
        context = self.spread.parts.context
        return tuple(context.shard(whole) for whole in both) if context else both

    def _evaluated(self, tokens_BT: Tensor, sequences: int) -> Tensor:
        """Runs forward only, through all stages."""
        parts = max(1, sequences // (self._data[1] * self.training.plan.microbatch))
        losses = self.spread.pipeline.evaluate(parts, *self._cut(tokens_BT))
        return self._share_of_mean(losses, len(tokens_BT), sequences)

    def _summed(self, shares: list[Tensor]) -> list[float]:
        """Sums each one over the ranks, exactly, so that it depends on nothing else."""
        row = torch.stack(shares) if shares else torch.empty(0, device=self.device)
        rows = [row]
        if dist.is_initialized():
            rows = [torch.empty_like(row) for _ in range(self.ranks)]
            dist.all_gather(rows, row, group=self.group)
        if self.here:  # tensor-parallel ranks have the same loss
            own = self.here.mesh.coordinates
            rows = [row for rank, row in enumerate(rows) if not own(rank)["tp"]]
        return [math.fsum(column) for column in torch.stack(rows, -1).tolist()]


def train(
    gpt: GPTConfig,
    training: TrainingConfig,
    folder: str | None = None,
    every: int | str | None = None,
    resume: bool = False,
    terminal: str | None = None,
    utilization: bool = False,
    keep: int | None = None,
    mtbf: float | None = None,
) -> Result:
    """A whole run, as each rank calls it: world.run(train, GPTConfig(), TrainingConfig()).

    folder: of its checkpoints, which are written beside the training
    every: steps from one to the next; None: one at the end; "auto": what Young's formula says for
        the seconds that steps and saves turn out to take
    resume: start where the folder's newest checkpoint is, if there is one
    terminal: the name of the one that rank 0 shows progress on
    utilization: also measure what the ranks can do, and say how much of it the run has used
    keep: how many checkpoints stay in the folder; None: all
    mtbf: mean seconds between two failures of the run; None: as if each rank failed as often as
        a GPU of Llama 3's run

    Raises ValueError for resume without a folder, for a folder with checkpoints without resume,
    or that another run writes to, and for an `every`, `keep` or `mtbf` that can't be.
    """
    if every not in (None, "auto") and not (type(every) is int and every >= 1):
        raise ValueError(f'every={every!r}: give a number of steps, 1 or more, "auto" or None')
    if mtbf is not None and not 0 < mtbf < math.inf:
        raise ValueError(f"mtbf={mtbf!r}: give seconds, above 0 and finite, or None")
    if folder is None and (every, keep, mtbf) != (None, None, None):
        said = f"every={every!r}, keep={keep!r}, mtbf={mtbf!r}"
        raise ValueError(f"{said} without a folder: say with folder where to save")
    if mtbf is not None and every != "auto":
        raise ValueError(f'mtbf={mtbf!r} with every={every!r}: say every="auto", or leave mtbf out')
    if resume and folder is None:
        raise ValueError("resume=True: say with folder where the checkpoints are")
    if folder and not resume:
        refuse_used(folder)
    trainer = Trainer(gpt, training)
    if resume:
        trainer.resume(folder)
    first, losses, started = trainer.step, [], time.perf_counter()
    with progress_line.bar(terminal if trainer.speaks else None, training.steps) as report:
        if folder is None:
            losses, every = trainer.run(report=report), None
        else:
            losses, every = _saved(trainer, folder, every, keep, mtbf, report)
    seconds = time.perf_counter() - started
    parameters = trainer.spread.parts.size
    used = _used(trainer, len(losses) / seconds) if utilization and losses else None
    result = losses, trainer.evaluate(), first, seconds, parameters, trainer.ranks, used, every
    return Result(*result)


def _saved(
    trainer: Trainer,
    folder: str,
    every: int | str | None,
    keep: int | None,
    mtbf: float | None,
    report,
) -> tuple[list[float], int | None]:
    """Trains to the end, and saves every so many steps; returns the losses, and how many."""
    mtbf = mtbf or failures.job_mtbf(LLAMA3_GPU_MTBF, trainer.ranks)
    losses = []
    steps = _FIRST_SAVE if every == "auto" else every
    with Checkpoints(folder, trainer.group, keep) as checkpoints:
        while (left := trainer.training.steps - trainer.step) > 0:
            began = time.perf_counter()
            losses += trainer.run(done := min(left, steps or left), report)
            trained = time.perf_counter()
            trainer.save(checkpoints)
            if every == "auto":
                stall = time.perf_counter() - trained
                steps = checkpoint.due((trained - began) / done, stall, mtbf, trainer.group)
    return losses, steps


def refuse_used(folder: str) -> None:
    """Raises ValueError for a folder with checkpoints: whose they are could not be told."""
    if any(Path(folder).glob("step-*")):
        how = "go on with it (resume=True, or --resume), or give another folder"
        raise ValueError(f"{folder} has the checkpoints of a run: {how}")


def _used(trainer: Trainer, steps_per_second: float) -> Utilization:
    gpt, training = trainer.gpt, trainer.training
    tokens = training.batch * gpt.seq * steps_per_second
    dtype = torch.bfloat16 if training.bf16 else _dtype(training)
    whole = peak_of_ranks(trainer.device, dtype, trainer.group)
    return Utilization(gpt.shape(), gpt.seq, tokens, whole, training.recompute, not gpt.dropout)


def learning_rate(step: int, training: TrainingConfig) -> float:
    """Returns the rate of a step, from 0: linear warm-up, then a cosine to a tenth at the last."""
    if step < training.warmup:
        return training.learning_rate * (step + 1) / training.warmup
    done = min(1.0, (step - training.warmup) / max(1, training.steps - 1 - training.warmup))
    cosine = (1 + math.cos(math.pi * done)) / 2
    return training.learning_rate * (_LOWEST + (1 - _LOWEST) * cosine)


def _place(group: Group) -> tuple[int, int, torch.device]:
    """This process's rank, the number of ranks, and where its tensors live."""
    if not dist.is_initialized():
        return 0, 1, torch.device("cpu")
    cuda = "nccl" in str(dist.get_backend_config(group))
    device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    return dist.get_rank(group), dist.get_world_size(group), device


def _here(
    gpt: GPTConfig, training: TrainingConfig, ranks: int, group: Group, device: torch.device
) -> Here | None:
    """This rank's place in the plan's mesh, if there is a plan."""
    if training.plan is None:
        return None
    if group is not None:
        raise ValueError("a group with a plan, which is for all ranks: leave one of both out")
    if not dist.is_initialized():
        raise ValueError("a plan takes a process group: train on a world's ranks")
    check_plan(gpt, training.plan, ranks)
    return mesh_of(training.plan).build(device.type)


def _dtype(training: TrainingConfig) -> torch.dtype:
    half = training.plan is not None and training.plan.precision == "bf16"
    return torch.bfloat16 if half else torch.float32
