"""parallel.pipeline: every schedule, in any wrapper, gives one process's gradients on real ranks and sends what theory says."""

import itertools
import os
import signal
import threading
import time
import weakref
from contextlib import contextmanager, nullcontext
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

import manyranks as mr
from manyranks.parallel.checkpointing import checkpoint_modules
from manyranks.parallel.data_parallel import OverlappedDataParallel
from manyranks.parallel.fsdp import FullyShardedDataParallel
from manyranks.parallel.pipeline import schedules
from manyranks.parallel.pipeline.automatic import automatic
from manyranks.parallel.pipeline.dualpipe import dualpipe
from manyranks.parallel.pipeline.mailbox import Mailbox
from manyranks.parallel.pipeline.paced import paced, timeline
from manyranks.parallel.pipeline.program import Times, program
from manyranks.parallel.pipeline.runtime import Pipeline
from manyranks.parallel.pipeline.schedules import singles
from manyranks.parallel.pipeline.split import Stage, split
from manyranks.parallel.pipeline.verify import peaks
from manyranks.timeline import replay
from manyranks.training.config import GPTConfig
from manyranks.training.gpt import GPT, loss
from tests.conftest import matrix
from tests.unit.test_pipeline_schedules import ALL, TORCH, cells, torch_schedule

SCHEDULES = ALL | {"interleaved": partial(schedules.interleaved, v=2), "automatic": automatic}
SOME = ["gpipe", "interleaved", "zb-h1", "dualpipe-v", "dualpipe"]
SEQ, HIDDEN, VOCAB = 5, 8, 11


@pytest.fixture(scope="module")
def sizes():
    """Worlds of 1 to 4 ranks by their size."""
    worlds = {n: mr.World(n, backend="gloo", timeout=30) for n in (1, 2, 3, 4)}
    yield worlds
    for world in worlds.values():
        world.close()


def gpt(style: str = "gpt2", frozen: tuple[str, ...] = (), layers: int = 4, **options) -> GPT:
    """Layers enough for 6 stages beside embedding and head; of each frozen name nothing learns."""
    config = GPTConfig(layers, HIDDEN, 2, vocab=VOCAB, seq=SEQ, style=style, **options)
    model = GPT(config).double()
    for name in frozen:
        model.get_submodule(name).requires_grad_(False)
    return model


def tokens(rows: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(seed)
    return torch.randint(0, VOCAB, (rows, SEQ)), torch.randint(0, VOCAB, (rows, SEQ))


def own_stages(model: nn.Module, schedule, rank: int) -> dict[int, Stage]:
    stages = split(model, schedule.stages)
    return {s: stages[s] for s in schedule.stages_of(rank)}


def gap(model: nn.Module, alone: nn.Module, stages: dict[int, nn.Module]) -> float:
    """The largest difference of a gradient of the stages to the one that another model has of that name."""
    own = {id(p) for stage in stages.values() for p in stage.parameters()}
    gaps = [0.0]
    for ours, theirs in zip(model.parameters(), alone.parameters(), strict=True):
        if id(ours) in own:
            assert (ours.grad is None) == (theirs.grad is None)
            gaps += [] if ours.grad is None else [(ours.grad - theirs.grad).abs().max().item()]
    return max(gaps)


def trained(schedule, rows: int, steps: int = 2, ties: bool = True, **options) -> tuple[float, float]:
    """Steps whose gradients add up: the gap to one process with the whole batches; the first loss and this rank's part.

    ties: whether each step sums what several stages share; else it's summed once, after all of them.
    """
    model, alone = gpt(**options), gpt(**options)
    pipeline = Pipeline(own_stages(model, schedule, dist.get_rank()), schedule, loss=loss, ties=ties)
    left = []
    for step in range(steps):
        inputs, targets = tokens(rows, step)
        losses = pipeline.step(inputs, targets)
        whole = loss(alone(inputs), targets)
        whole.backward()
        assert losses is None or schedule.stages - 1 in pipeline.stages
        left.append((whole.item(), 0.0 if losses is None else losses.sum().item()))
    if not ties:
        pipeline.tie()
    return gap(model, alone, pipeline.stages), left[0]


def worst(found: list) -> float:
    """The largest of all ranks' gaps, and of what their losses together miss."""
    wholes, own = zip(*(losses for _, losses in found), strict=True)
    return max(max(gap for gap, _ in found), abs(sum(own) - wholes[0]))


# Against one process: schedules × ranks, then × wrappers.

MORE = {f"interleaved, v = {v}": partial(schedules.interleaved, v=v) for v in (1, 3)}
PLACES = [(name, p) for name in [*SCHEDULES, *MORE] for p in (1, 2, 3, 4) if name != "dualpipe" or p in (2, 4)]
KEPT = [("naive", 1), ("1f1b", 4), ("interleaved", 3), ("zb-v", 3), ("dualpipe", 2), ("dualpipe", 4)]


@pytest.mark.parametrize(("name", "p"), matrix(PLACES, KEPT))
def test_gradients_and_losses_are_those_of_one_process(sizes, name, p):
    for m in sorted({1, 2, p, 2 * p, 2 * p + 1, 4 * p}):
        schedule = (SCHEDULES | MORE)[name](p, m)
        run = partial(trained, schedule, 4 * p + 1, layers=max(1, schedule.stages - 2))  # micro-batches are not of one size
        assert worst(sizes[p].run(run)) < 1e-12


class Averaging(nn.Module):
    """A wrapper of somebody else's: of this library's it has no_sync() and finish() alone."""

    def __init__(self, stage: nn.Module, group: dist.ProcessGroup):
        super().__init__()
        self.module, self.group, self.kept = stage, group, 0

    def forward(self, x):
        return self.module(x)

    @contextmanager
    def no_sync(self):
        self.kept += 1
        yield

    def finish(self):
        for parameter in self.parameters():
            dist.all_reduce(parameter.grad, group=self.group)
            parameter.grad /= 2


def whole_gradients(stage: nn.Module, group: dist.ProcessGroup) -> dict[str, torch.Tensor]:
    """The gradients of a stage, put together if it is sharded."""
    if not isinstance(stage, FullyShardedDataParallel):
        return {name.removeprefix("module."): p.grad for name, p in stage.named_parameters()}
    found = {}
    for unit in stage.units:
        assert not unit.gathered
        row_E = unit.row_E.new_empty(unit.row_E.numel())
        mine = unit.row.join([shard.grad for shard in unit.shards], row_E.new_zeros(unit.row.size))
        dist.all_gather_single(row_E, mine, group=group)
        found |= zip(unit.row.names, unit.row.parts(row_E), strict=True)
    return found


WRAPPERS = {
    "data parallel": partial(OverlappedDataParallel, bucket_bytes=2000),
    "FSDP": FullyShardedDataParallel,
    "another's": Averaging,
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("name", matrix(SCHEDULES, ["zb-h1", "dualpipe-v", "dualpipe"]))
def test_so_they_are_in_any_wrapper_over_replicas(sizes, name, wrapper):
    """2 pipelines of 2 ranks. Each replica has its own batch; gradients are of the mean, and leave once a step."""
    schedule = SCHEDULES[name](2, 5)

    def run():
        replica, place = divmod(dist.get_rank(), 2)
        pipelines = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        replicas = [dist.new_group([0, 2]), dist.new_group([1, 3])][place]
        model, alone = gpt(tied=False), gpt(tied=False)
        sizes = [p.nbytes for stage in own_stages(model, schedule, place).values() for p in stage.parameters()]
        wrapped = {s: WRAPPERS[wrapper](one, group=replicas) for s, one in own_stages(model, schedule, place).items()}
        ours = Pipeline(wrapped, schedule, pipelines[replica], loss)
        for step in range(1 if wrapper == "another's" else 2):
            ours.step(*tokens(6, 2 * step + replica))
            for seed in (2 * step, 2 * step + 1):
                inputs, targets = tokens(6, seed)
                (loss(alone(inputs), targets) / 2).backward()
        gaps, theirs = [], own_stages(alone, schedule, place)
        for s, stage in wrapped.items():
            named, found = dict(theirs[s].named_parameters()), whole_gradients(stage, replicas)
            assert found.keys() == named.keys()
            gaps += [(grad - named[name].grad).abs().max().item() for name, grad in found.items()]
        once = [getattr(stage, "kept", None) for stage in wrapped.values()]
        return max(gaps), sum(sizes), once

    measured = sizes[4].measure(run)
    for rank, (difference, own, once) in enumerate(measured.results):
        assert difference < 1e-12
        reduced = sum(c.bytes for c in measured.calls[rank] if c.op == "all_reduce")
        if wrapper != "FSDP":
            assert reduced == own * (1 if wrapper == "another's" else 2)  # steps
        if wrapper == "another's":  # all but each stage's last B or W
            actions = [[a for a in schedule.actions(rank % 2) if a.stage == s] for s in schedule.stages_of(rank % 2)]
            assert once == [len(own) - 1 for own in actions]


def test_stages_of_one_rank_that_share_a_parameter_are_averaged_in_one_wrapper(sizes):
    def run():
        schedule = SCHEDULES["zb-v"](2, 5)
        replica, place = divmod(dist.get_rank(), 2)
        pipelines = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        replicas = [dist.new_group([0, 2]), dist.new_group([1, 3])][place]
        model, alone = gpt(), gpt()
        stages = own_stages(model, schedule, place)
        ours, wrapper = Pipeline(stages, schedule, pipelines[replica], loss), nn.ModuleList(stages.values())
        wrapper = OverlappedDataParallel(wrapper, replicas)
        with wrapper.no_sync():
            ours.step(*tokens(6, replica))
        wrapper.finish()
        for seed in (0, 1):
            inputs, targets = tokens(6, seed)
            (loss(alone(inputs), targets) / 2).backward()
        return gap(model, alone, stages)

    assert max(sizes[4].run(run)) < 1e-12


@pytest.mark.parametrize("name", matrix(["1f1b", "zb-h1", "zb-v"], ["zb-v"]))
@pytest.mark.parametrize("frozen", [("embedding",), ("embedding", "layers.0", "layers.1"), ("layers.3",), ("head",)])
def test_so_they_are_where_some_layers_are_frozen(sizes, name, frozen):
    assert worst(sizes[2].run(trained, SCHEDULES[name](2, 3), 3, frozen=frozen, tied=False, style="llama")) < 1e-12
    assert worst(sizes[2].run(trained, SCHEDULES["1f1b"](2, 3), 3, frozen=("embedding",))) < 1e-12  # it is the head, too


@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_dropout_and_checkpoints_are_those_of_a_plain_loop_with_the_same_random_numbers(sizes, name):
    def both():
        model, alone = gpt(dropout=0.3), gpt(dropout=0.3)
        checkpoint_modules(model, lambda module: module in (model.layers[1], model.layers[2].mlp))
        schedule = SCHEDULES[name](1, 3)
        stages = own_stages(model, schedule, 0)
        inputs, targets = tokens(3, 0)
        torch.manual_seed(7)
        Pipeline(stages, schedule, loss=loss).step(inputs, targets)
        torch.manual_seed(7)
        for k in range(3):
            (loss(alone(inputs[k : k + 1]), targets[k : k + 1]) / 3).backward()
        return gap(model, alone, stages)

    assert max(sizes[1].run(both)) < 1e-12


# What it sends and holds.


@pytest.mark.parametrize("name", matrix(SCHEDULES, SOME))
def test_each_boundary_between_ranks_carries_a_micro_batch_once_in_each_direction(sizes, name):
    p, m, b = 4, 6, 2
    schedule = SCHEDULES[name](p, m)
    options = {"tied": False, "layers": max(4, schedule.stages - 2)}
    one, two = (sizes[p].measure(trained, schedule, m * b, steps, **options) for steps in (1, 2))
    step, told = [0] * p, [8 * (p - 1)] * p  # in the first step, whether all have one schedule
    for (s, k), to in itertools.product(itertools.product(range(schedule.stages), range(m)), (-1, 1)):
        if 0 <= s + to < schedule.stages and (rank := schedule.rank_of(s, k)) != schedule.rank_of(s + to, k):
            step[rank] += b * SEQ * HIDDEN * 8
            told[rank] += 80 * (to > 0)  # shape and dtype
    for s, stage in enumerate(split(gpt(**options), schedule.stages)):
        for rank in schedule.ranks_of(s) if len(schedule.ranks_of(s)) > 1 else ():
            step[rank] += sum(p.nbytes for p in stage.parameters())  # the gradients of two copies
    assert [one.payload_bytes[r] for r in range(p)] == [a + b for a, b in zip(step, told, strict=True)]
    assert [two.payload_bytes[r] - one.payload_bytes[r] for r in range(p)] == step


@pytest.mark.parametrize("name", ["gpipe", "interleaved", "zb-v"])
def test_a_tied_embedding_is_swapped_once_a_step_unless_its_stages_share_a_rank(sizes, name):
    schedule = SCHEDULES[name](3, 3)
    measured = sizes[3].measure(trained, schedule, 3, steps=2)
    size = VOCAB * HIDDEN * 8
    sent = [[c.peer for c in measured.calls[r] if c.op == "send" and c.bytes == size] for r in range(3)]
    assert sent == ([[], [], []] if name == "zb-v" else [[2, 2], [], [0, 0]])
    assert worst(measured.results) < 1e-12


@pytest.mark.parametrize("name", ["gpipe", "dualpipe-v"])
def test_what_stages_share_may_be_summed_once_after_several_steps(sizes, name):
    assert worst(sizes[3].run(trained, SCHEDULES[name](3, 6), 6, steps=3, ties=False)) < 1e-12


class Marked(nn.Module):
    """A layer whose forward leaves a mark that lives as long as what it has saved for backward."""

    def __init__(self, marks: weakref.WeakSet, counts: list[int]):
        super().__init__()
        self.linear = nn.Linear(4, 4).double()
        self.marks, self.counts = marks, counts

    def forward(self, x):
        y = _Mark.apply(self.linear(x), self.marks)
        self.counts.append(len(self.marks))
        return y


class _Mark(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, marks):
        ctx.mark = torch.zeros(1)
        marks.add(ctx.mark)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad, None


@pytest.mark.parametrize("name", SCHEDULES)
def test_as_many_micro_batches_are_in_flight_as_the_table_says(sizes, name):
    p, m = 4, 9
    schedule = SCHEDULES[name](p, m)

    def run():
        marks, counts = weakref.WeakSet(), []
        stages = {s: Marked(marks, counts) for s in schedule.stages_of(dist.get_rank())}
        x = torch.ones(m, 4, dtype=torch.float64)
        Pipeline(stages, schedule, loss=nn.functional.mse_loss).step(x, x)
        assert not marks
        return max(counts), sum(p.numel() for stage in stages.values() for p in stage.parameters()) / 20

    (found, copies), planned = zip(*sizes[p].run(run), strict=True), peaks(schedule)
    assert sum(copies) == schedule.stages * (2 if name == "dualpipe" else 1)
    splits = any(action.kind == "I" for rank in range(p) for action in schedule.actions(rank))
    # Of a split backward, only what W multiplies stays after I: the marks do not. DualPipe splits when it holds less.
    assert found == planned if name == "dualpipe" or not splits else all(map(int.__le__, found, planned))


def test_what_was_sent_is_forgotten_once_it_has_arrived(sizes):
    def run():
        most, start = [0], Mailbox._start

        def counting(self, *args, **kwargs):
            start(self, *args, **kwargs)
            most[0] = max(most[0], sum(map(len, self._sent.values())))

        Mailbox._start = counting
        try:
            trained(schedules.one_f_one_b(3, 12), 12, steps=2)
        finally:
            Mailbox._start = start
        return most[0]

    assert max(sizes[3].run(run)) <= 2 * 3 + 3  # outputs in flight, each with its shape in the first step, and gradients


def test_a_receive_is_posted_while_the_action_before_computes(sizes):
    measured = sizes[3].measure(trained, schedules.gpipe(3, 3), 3, steps=2, tied=False)
    told = [call.op for call in measured.calls[1] if call.bytes != 80]
    # Of the rank in the middle, in the step in which it knows the shapes, between its items: F0, F1, F2, B0, B1, B2.
    between = ["recv recv", "send recv", "send", "send recv recv", "send recv", "send", "send"]
    assert told[13:] == " ".join(between).split()


@pytest.mark.parametrize("name", SOME)
def test_messages_larger_than_any_buffer_do_not_deadlock(sizes, name):
    def run():
        schedule = SCHEDULES[name](2, 5)
        stages = {s: nn.Linear(2, 2) for s in schedule.stages_of(dist.get_rank())}
        x = torch.ones(5, 200_000, 2)
        return Pipeline(stages, schedule, loss=nn.functional.mse_loss).step(x, x) is not None

    assert any(sizes[2].run(run))


# PyTorch's own runtime.


@pytest.mark.parametrize("name", TORCH)
def test_torch_s_own_tables_are_executed(sizes, name):
    assert worst(sizes[2].run(trained, torch_schedule(name, 2, 6), 6, steps=1)) < 1e-12


@pytest.mark.parametrize("name", [name for name in SCHEDULES if name != "dualpipe"])
def test_torch_s_runtime_executes_our_tables_with_the_same_gradients(sizes, name, tmp_path):
    schedule, file = SCHEDULES[name](3, 6), tmp_path / "schedule.csv"
    file.write_text("\n".join(map(",".join, cells(schedule))), newline="")

    def both():
        from torch.distributed.pipelining.schedules import PipelineStage, _PipelineScheduleRuntime

        rank, last = dist.get_rank(), schedule.stages - 1
        model, theirs = gpt(tied=False), gpt(tied=False)
        stages, others = (own_stages(m, schedule, rank) for m in (model, theirs))
        inputs, targets = tokens(6, 0)
        losses, their_losses = Pipeline(stages, schedule, loss=loss).step(inputs, targets), []
        torch_stages = [PipelineStage(o, s, last + 1, torch.device("cpu")) for s, o in others.items()]
        runtime = _PipelineScheduleRuntime(torch_stages, 6, loss_fn=loss)
        runtime._load_csv(str(file))
        given = {"target": targets, "losses": their_losses} if last in stages else {}
        runtime.step(*([inputs] if 0 in stages else []), **given)
        assert losses is None or (losses - torch.stack(their_losses) / 6).abs().max() < 1e-12
        return gap(model, theirs, stages)

    assert max(sizes[3].run(both)) < 1e-12


# Held to a set duration.


@pytest.mark.parametrize("name", ["dualpipe", *matrix(["1f1b", "dualpipe-v"], [])])
def test_paced_actions_take_their_time_and_are_noted_in_the_table_s_order(sizes, name):
    p, m = 2, 5
    schedule, times = SCHEDULES[name](p, m), Times(F=0.1, I=0.1, W=0.1)
    measured = timeline(sizes[p].run(paced, schedule, times))
    assert min(span.started for span in measured.spans) == 0
    for rank in range(p):
        spans, actions = measured.of(rank), schedule.actions(rank)
        assert [span.name for span in spans] == [f"{a.kind}{a.microbatch}" for a in actions]
        assert all(span.seconds > (0.1999 if a.kind == "B" else 0.0999) for span, a in zip(spans, actions, strict=True))
    assert measured.makespan > replay(program(schedule), times).makespan - 1e-3


# Failures.


class Failing(nn.Linear):
    def forward(self, x):
        if x.sum() > 2.5 * x.numel():
            raise RuntimeError("this micro-batch is too large")
        return super().forward(x)


@pytest.mark.parametrize("name", ["1f1b", "zb-v"])
def test_a_failure_in_the_middle_names_its_rank_and_leaves_no_rank_waiting(world, name):
    schedule = SCHEDULES[name](3, 5)

    def run():
        torch.manual_seed(0)
        stages = {s: (Failing if s == 1 else nn.Identity)(4, 4) for s in schedule.stages_of(dist.get_rank())}
        x = torch.arange(5.0)[:, None].expand(5, 4)
        Pipeline(stages, schedule, loss=nn.functional.mse_loss).step(x, x)

    started = time.monotonic()
    with pytest.raises(mr.RankFailed, match="this micro-batch is too large"):
        world.run(run)
    assert time.monotonic() - started < 20
    assert worst(world.run(trained, schedule, 5)) < 1e-12


@pytest.mark.parametrize("name", matrix(["1f1b", "zb-v"], ["1f1b"]))
def test_an_interrupt_in_the_middle_of_a_step_leaves_no_rank_waiting(world, name, tmp_path):
    schedule = SCHEDULES[name](3, 5)

    def run():
        stages = own_stages(gpt(), schedule, dist.get_rank())
        pipeline = Pipeline(stages, schedule, loss=loss)
        pipeline.step(*tokens(5, 0))
        if dist.get_rank() == 1:  # the others soon wait for it
            pipeline.pace = lambda item: time.sleep(60) if singles(item)[0].microbatch == 2 else nullcontext()
            (tmp_path / "ready").touch()
        pipeline.step(*tokens(5, 0))

    def interrupt():
        while not (tmp_path / "ready").exists():
            time.sleep(0.01)
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        world.run(run)
    assert time.monotonic() - started < 20
    assert worst(world.run(trained, schedule, 5)) < 1e-12


def test_ranks_with_other_schedules_are_told_so_before_the_first_message(sizes):
    def told() -> str:
        schedule = schedules.gpipe(3, 4) if dist.get_rank() < 2 else schedules.one_f_one_b(3, 4)
        pipeline = Pipeline({dist.get_rank(): nn.Linear(2, 2)}, schedule, loss=nn.MSELoss())
        try:
            pipeline.step(torch.ones(4, 2), torch.ones(4, 2))
        except ValueError as error:
            return f"{error}"

    m = sizes[3].measure(told)
    assert ["rank 2 of the group was given another schedule than rank" in said for said in m.results] == [True, True, False]
    assert m.results[2].startswith("1f1b: rank 0 of the group was given another schedule than rank 2")
    assert {call.op for calls in m.calls.values() for call in calls} == {"all_gather"}


# Refusals: what is given on each of 2 ranks, by the rank, and what is said.

ONE = schedules.one_f_one_b(2, 3)
BROKEN = type(ONE)("broken", 3, (0, 1), (ONE.ranks[0][:-1], ONE.ranks[1]))


def stage(rank: int, **methods) -> dict[int, nn.Module]:
    module = nn.Linear(2, 2)
    for name, method in methods.items():
        setattr(module, name, method)
    return {rank: module}


def tied_in(wrapper, name: str, rank: int) -> dict[int, nn.Module]:
    alone = [dist.new_group([r]) for r in range(2)][rank]
    return {s: wrapper(one, alone) for s, one in own_stages(gpt(), SCHEDULES[name](2, 2), rank).items()}


MADE = [
    (stage, schedules.gpipe(3, 2), nn.MSELoss(), "is for 3 ranks and the group has 2: make the schedule for p=2"),
    (lambda rank: stage(5), ONE, nn.MSELoss(), r"stages \[5\] given to rank .: 1f1b places"),
    (lambda rank: stage(0), schedules.zb_v(2, 2), nn.MSELoss(), r"stages \[0\] given to rank .: zb-v places \[.,"),
    (lambda rank: stage(rank), BROKEN, nn.MSELoss(), "is missing"),
    (lambda rank: stage(1 - rank), dualpipe(2, 2), nn.MSELoss(), r"dualpipe places \[0, 1\] there; give these"),
    (partial(stage, no_sync=nullcontext), ONE, nn.MSELoss(), r"a Linear, which has no_sync\(\) alone: .* and finish\(\)"),
    (partial(stage, finish=nullcontext), ONE, nn.MSELoss(), r"a Linear, which has finish\(\) alone: a wrapper has no_sync\(\)"),
    (partial(tied_in, FullyShardedDataParallel, "1f1b"), schedules.one_f_one_b(2, 2), loss, "sharded .* untie it"),
]


@pytest.mark.parametrize(("given", "schedule", "of", "said"), MADE, ids=[said[:25] for *_, said in MADE])
def test_a_pipeline_that_cannot_be_is_refused(sizes, given, schedule, of, said):
    def run():
        with pytest.raises(ValueError, match=said):
            Pipeline(given(dist.get_rank()), schedule, loss=of)

    sizes[2].run(run)


def test_on_the_rank_that_it_concerns_it_is_refused_too(sizes):
    def run():
        rank = dist.get_rank()
        wrapped = tied_in(OverlappedDataParallel, "zb-v", rank)
        if rank == 0:
            with pytest.raises(ValueError, match=r"stages \[0, 3\] share a parameter, .* nn.ModuleList"):
                Pipeline(wrapped, schedules.zb_v(2, 2), loss=loss)
        else:
            with pytest.raises(ValueError, match="give it a loss"):
                Pipeline(stage(rank), ONE)

    sizes[2].run(run)


class Wrong(nn.Module):
    def forward(self, x):
        return [x]


mean, by_row = nn.functional.mse_loss, partial(nn.functional.mse_loss, reduction="none")
STEPS = [
    (nn.Identity(), mean, 3, 2 * [torch.ones(2)], "of 2 rows in m=3 micro-batches: each needs one; give 3 or more"),
    (nn.Identity(), mean, 3, [], "this rank has a stage that needs inputs"),
    (nn.Identity(), by_row, 1, 2 * [torch.ones(2)], "a scalar"),
    (Wrong(), mean, 1, 2 * [torch.ones(1)], "from one tensor to one tensor"),
]


@pytest.mark.parametrize(("module", "of", "m", "batch", "said"), STEPS, ids=[said[:25] for *_, said in STEPS])
def test_a_step_that_cannot_be_is_refused(sizes, module, of, m, batch, said):
    def run():
        with pytest.raises(ValueError, match=said):
            Pipeline({0: module}, schedules.naive(1, m), loss=of).step(*batch)

    sizes[1].run(run)


def test_another_shape_in_a_later_step_and_too_short_a_pace_are_refused(world):
    def run():
        schedule = schedules.one_f_one_b(3, 2)
        pipeline = Pipeline(own_stages(gpt(), schedule, dist.get_rank()), schedule, loss=loss)
        for rows in (2, 4):
            pipeline.step(*tokens(rows, 0))

    with pytest.raises(mr.RankFailed, match="make another Pipeline"):
        world.run(run)
    with pytest.raises(mr.RankFailed, match="took longer than they may: give longer times"):
        world.run(paced, schedules.one_f_one_b(3, 3), Times(1e-9, 1e-9, 1e-9))
