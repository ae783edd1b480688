"""parallel.pipeline: every schedule, executed on real ranks, gives one process's gradients, and sends what theory says."""

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
from manyranks.measure.parity import BUG, REASSOCIATION, Trace, compare, gathered, record
from manyranks.parallel.checkpointing import checkpoint_modules
from manyranks.parallel.data_parallel import OverlappedDataParallel
from manyranks.parallel.fsdp import FullyShardedDataParallel
from manyranks.parallel.pipeline import schedules
from manyranks.parallel.pipeline.automatic import automatic
from manyranks.parallel.pipeline.mailbox import Mailbox
from manyranks.parallel.pipeline.program import Times, paced, program, timeline
from manyranks.parallel.pipeline.runtime import Pipeline
from manyranks.parallel.pipeline.schedules import singles
from manyranks.parallel.pipeline.split import Stage, split
from manyranks.parallel.pipeline.verify import peaks
from manyranks.timeline import replay
from manyranks.training.config import GPTConfig
from manyranks.training.gpt import GPT, loss
from tests.conftest import matrix
from tests.unit.test_pipeline_schedules import TORCH, cells, torch_schedule

SCHEDULES = {
    "naive": schedules.naive,
    "gpipe": schedules.gpipe,
    "1f1b": schedules.one_f_one_b,
    "interleaved": partial(schedules.interleaved, v=2),
    "zb-h1": schedules.zb_h1,
    "zb-h2": schedules.zb_h2,
    "zb-v": schedules.zb_v,
    "dualpipe-v": schedules.dualpipe_v,
    "automatic": automatic,
}
SOME = ["gpipe", "interleaved", "zb-h1", "dualpipe-v"]
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
    return {s: stages[s] for s, owner in enumerate(schedule.placement) if owner == rank}


def gap(model: nn.Module, alone: nn.Module, stages: dict[int, nn.Module]) -> float:
    """The largest difference of a gradient of the stages to the one that another model has of that name."""
    own = {id(p) for stage in stages.values() for p in stage.parameters()}
    pairs = zip(model.parameters(), alone.parameters(), strict=True)
    gaps = [0.0]
    for ours, theirs in pairs:
        if id(ours) in own:
            assert (ours.grad is None) == (theirs.grad is None)
            gaps += [] if ours.grad is None else [(ours.grad - theirs.grad).abs().max().item()]
    return max(gaps)


def trained(schedule, rows: int, steps: int = 2, **options) -> float:
    """Steps whose gradients add up; the gap to one process with the whole batches. Losses are compared, too."""
    model, alone = gpt(**options), gpt(**options)
    stages = own_stages(model, schedule, dist.get_rank())
    pipeline = Pipeline(stages, schedule, loss=loss)
    for step in range(steps):
        inputs, targets = tokens(rows, step)
        losses = pipeline.step(inputs, targets)
        whole = loss(alone(inputs), targets)
        whole.backward()
        assert (losses is not None) == (schedule.stages - 1 in stages)
        assert losses is None or abs(losses.sum() - whole) < 1e-12
    return gap(model, alone, stages)


MORE = {f"interleaved, v = {v}": partial(schedules.interleaved, v=v) for v in (1, 3)}


@pytest.mark.parametrize("p", matrix([1, 2, 3, 4], [3]))
@pytest.mark.parametrize("name", [*SCHEDULES, *MORE])
@pytest.mark.few(4)
def test_gradients_and_losses_are_those_of_one_process(sizes, name, p):
    tables = [(SCHEDULES | MORE)[name](p, m) for m in sorted({1, 2, p, 2 * p, 2 * p + 1, 4 * p})]
    options = {"layers": max(1, tables[0].stages - 2)}

    def every_m():
        model, alone = gpt(**options), gpt(**options)
        inputs, targets = tokens(4 * p + 1, 0)  # micro-batches are not of one size
        whole = loss(alone(inputs), targets)
        whole.backward()
        stages = own_stages(model, tables[0], dist.get_rank())
        gaps = []
        for schedule in tables:
            model.zero_grad()
            losses = Pipeline(stages, schedule, loss=loss).step(inputs, targets)
            gaps += [gap(model, alone, stages), 0.0 if losses is None else abs(losses.sum() - whole).item()]
        return max(gaps)

    assert max(sizes[p].run(every_m)) < 1e-10


FROZEN = [("embedding",), ("embedding", "layers.0", "layers.1"), ("layers.3",), ("head",)]


@pytest.mark.parametrize("name", matrix(["1f1b", "zb-h1", "zb-v"], ["zb-v"]))
@pytest.mark.parametrize("frozen", FROZEN)
def test_so_they_are_where_some_layers_are_frozen(sizes, name, frozen):
    run = partial(trained, SCHEDULES[name](2, 3), 3, frozen=frozen, tied=False, style="llama")
    assert max(sizes[2].run(run)) < 1e-10


def test_a_shared_parameter_that_is_frozen_stays_without_gradient(sizes):
    run = partial(trained, SCHEDULES["1f1b"](2, 3), 3, frozen=("embedding",))
    assert max(sizes[2].run(run)) < 1e-10


@pytest.mark.parametrize("name", ["gpipe", "interleaved", "zb-v"])
def test_a_tied_embedding_is_swapped_once_a_step_unless_its_stages_share_a_rank(sizes, name):
    schedule = SCHEDULES[name](3, 3)
    measured = sizes[3].measure(trained, schedule, 3, steps=2)
    size = VOCAB * HIDDEN * 8
    sent = [[c.peer for c in measured.calls[r] if c.op == "send" and c.bytes == size] for r in range(3)]
    assert sent == ([[], [], []] if name == "zb-v" else [[2, 2], [], [0, 0]])
    assert max(measured.results) < 1e-10


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

    assert max(sizes[1].run(both)) < 1e-10


# Inside data parallelism and FSDP.


def grid() -> tuple[int, int, dist.ProcessGroup, dist.ProcessGroup]:
    """2 pipelines of 2 stages: this rank's replica and place, its pipeline, and the ranks with the same stages."""
    replica, place = divmod(dist.get_rank(), 2)
    pipelines = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    replicas = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    return replica, place, pipelines[replica], replicas[place]


def whole_batch(alone: nn.Module, steps: int, rows: int) -> None:
    """Each replica has a batch of its own; gradients are of the mean."""
    for seed in range(2 * steps):
        inputs, targets = tokens(rows, seed)
        (loss(alone(inputs), targets) / 2).backward()


def one_wrapper(stages: dict[int, Stage], replicas: dist.ProcessGroup, schedule, pipeline) -> tuple:
    """The pipeline, and what is to be finished after its step: a wrapper of stages that share a parameter."""
    wrap = partial(OverlappedDataParallel, group=replicas, bucket_bytes=2000)
    if schedule.placement[0] != schedule.placement[-1]:
        return Pipeline({s: wrap(stage) for s, stage in stages.items()}, schedule, pipeline, loss), None
    return Pipeline(stages, schedule, pipeline, loss), wrap(nn.ModuleList(stages.values()))


@pytest.mark.parametrize("name", SOME)
@pytest.mark.few(1)
def test_data_parallel_replicas_average_once_a_step(sizes, name):
    def run():
        schedule = SCHEDULES[name](2, 5)
        replica, place, pipeline, replicas = grid()
        model, alone = gpt(), gpt()
        stages = own_stages(model, schedule, place)
        ours, wrapper = one_wrapper(stages, replicas, schedule, pipeline)
        for step in range(2):
            with wrapper.no_sync() if wrapper else nullcontext():
                ours.step(*tokens(6, 2 * step + replica))
            if wrapper:
                wrapper.finish()
        whole_batch(alone, steps=2, rows=6)
        own = {p for stage in stages.values() for p in stage.parameters()}
        return gap(model, alone, stages), sum(p.nbytes for p in own)

    measured = sizes[4].measure(run)
    for rank, (difference, own) in enumerate(measured.results):
        assert difference < 1e-10
        assert sum(c.bytes for c in measured.calls[rank] if c.op == "all_reduce") == 2 * own


@pytest.mark.parametrize("name", SOME)
@pytest.mark.few(1)
def test_stages_may_be_fully_sharded(sizes, name):
    def run():
        schedule = SCHEDULES[name](2, 5)
        replica, place, pipeline, replicas = grid()
        model, alone = gpt(tied=False), gpt(tied=False)
        stages = own_stages(model, schedule, place)
        wrapped = {s: FullyShardedDataParallel(stage, replicas) for s, stage in stages.items()}
        ours = Pipeline(wrapped, schedule, pipeline, loss)
        for step in range(2):
            ours.step(*tokens(6, 2 * step + replica))
        whole_batch(alone, steps=2, rows=6)
        gaps, theirs = [], own_stages(alone, schedule, place)
        for s, stage in wrapped.items():
            named = dict(theirs[s].named_parameters())
            for unit in stage.units:
                assert not unit.gathered
                row_E = unit.row_E.new_empty(unit.row_E.numel())
                grads = [shard.grad for shard in unit.shards]
                dist.all_gather_single(row_E, unit.row.join(grads, row_E.new_zeros(unit.row.size)), group=replicas)
                wholes = zip(unit.row.names, unit.row.parts(row_E), strict=True)
                gaps += [(whole - named[name].grad).abs().max() for name, whole in wholes]
        return max(gaps).item()

    assert max(sizes[4].run(run)) < 1e-10


class Averaging(nn.Module):
    """A wrapper of somebody else's: of this library's it has no_sync() and finish() alone."""

    def __init__(self, stage: nn.Module, group: dist.ProcessGroup):
        super().__init__()
        self.inside, self.group, self.kept = stage, group, 0

    def forward(self, x):
        return self.inside(x)

    @contextmanager
    def no_sync(self):
        self.kept += 1
        yield

    def finish(self):
        for parameter in self.parameters():
            dist.all_reduce(parameter.grad, group=self.group)
            parameter.grad /= 2


def test_any_wrapper_with_no_sync_and_finish_will_do_and_half_of_one_is_refused(sizes):
    def run():
        schedule = SCHEDULES["zb-h1"](2, 5)
        replica, place, pipeline, replicas = grid()
        model, alone = gpt(tied=False), gpt(tied=False)
        stages = own_stages(model, schedule, place)
        wrapped = {s: Averaging(stage, replicas) for s, stage in stages.items()}
        Pipeline(wrapped, schedule, pipeline, loss).step(*tokens(6, replica))
        whole_batch(alone, steps=1, rows=6)
        for half, missing in (("no_sync", "finish"), ("finish", "no_sync")):
            stage = nn.Linear(2, 2)
            setattr(stage, half, nullcontext)
            with pytest.raises(ValueError, match=rf"stage {place} is a Linear, which has {half}\(\) alone.*{missing}\(\)"):
                Pipeline({place: stage}, schedule, pipeline, loss)
        return gap(model, alone, stages), wrapped[place].kept

    # F, I and W of 5 micro-batches, but for the last W.
    assert [(gap < 1e-10, kept) for gap, kept in sizes[4].run(run)] == [(True, 14)] * 4


def test_a_shared_parameter_in_wrappers_that_cannot_average_it_is_refused(sizes):
    def run():
        alone = [dist.new_group([r]) for r in range(2)][dist.get_rank()]
        for name, wrapper, problem in [
            ("1f1b", FullyShardedDataParallel, "share a parameter that is sharded .* untie it"),
            ("zb-v", OverlappedDataParallel, r"stages \[0, 3\] share a parameter, .* nn.ModuleList"),
        ]:
            schedule = SCHEDULES[name](2, 2)
            stages = own_stages(gpt(), schedule, dist.get_rank())
            wrapped = {s: wrapper(stage, alone) for s, stage in stages.items()}
            if name == "1f1b" or 0 in stages:
                with pytest.raises(ValueError, match=problem):
                    Pipeline(wrapped, schedule, loss=loss)

    sizes[2].run(run)


# What the parity tool says of it.


def lockstep(name: str, wrong: bool = False) -> Trace:
    """A step with everything recorded. wrong: one module forgets half of its gradient."""
    schedule, model = SCHEDULES[name](2, 3), gpt(tied=False)
    if wrong:
        model.layers[2].mlp.register_full_backward_hook(lambda module, into, grads: (into[0] / 2,))
    pipeline = Pipeline(own_stages(model, schedule, dist.get_rank()), schedule, loss=loss)
    with record(model) as trace:
        pipeline.step(*tokens(6, 0))
    return trace


@pytest.mark.parametrize("name", ["interleaved", "zb-v"])
def test_every_tensor_is_one_process_s_but_for_roundings_and_a_bug_is_found_where_it_is(sizes, name):
    alone = gpt(tied=False)
    with record(alone) as reference:
        inputs, targets = tokens(6, 0)
        loss(alone(inputs), targets).backward()
    right = gathered(sizes[2].run(lockstep, name))
    assert set(reference) - set(right) == {"model", "model (gradient)"}  # the stages are called, not the model
    departure = compare(reference, right)
    assert departure is None or departure.verdict == REASSOCIATION
    departure = compare(reference, gathered(sizes[2].run(lockstep, name, wrong=True)))
    assert (departure.name, departure.verdict) == ("layers.2.mlp_norm (gradient)", BUG)


# What it sends and holds.


@pytest.mark.parametrize("name", matrix(SCHEDULES, SOME))
def test_each_boundary_between_ranks_carries_a_micro_batch_once_in_each_direction(sizes, name):
    p, m, b = 3, 4, 2
    schedule = SCHEDULES[name](p, m)
    one, two = (sizes[p].measure(trained, schedule, m * b, steps, tied=False) for steps in (1, 2))
    step, told = [0] * p, [0] * p
    for before, after in itertools.pairwise(schedule.placement):
        if before != after:
            step[before] += m * b * SEQ * HIDDEN * 8
            step[after] += m * b * SEQ * HIDDEN * 8
            told[before] += m * 80  # shape and dtype, in the first step
    told = [bytes + 8 * (p - 1) for bytes in told]  # and whether all have one schedule
    assert [one.payload_bytes[r] for r in range(p)] == [a + b for a, b in zip(step, told, strict=True)]
    assert [two.payload_bytes[r] - one.payload_bytes[r] for r in range(p)] == step


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
        rank, marks, counts = dist.get_rank(), weakref.WeakSet(), []
        own = [s for s, owner in enumerate(schedule.placement) if owner == rank]
        pipeline = Pipeline({s: Marked(marks, counts) for s in own}, schedule, loss=nn.functional.mse_loss)
        x = torch.ones(m, 4, dtype=torch.float64)
        pipeline.step(x, x)
        assert not marks
        return max(counts)

    found, planned = sizes[p].run(run), list(peaks(schedule))
    splits = any(action.kind == "I" for rank in range(p) for action in schedule.actions(rank))
    # Of a split backward, only what W multiplies stays after I: the marks do not.
    assert found == planned if not splits else all(a <= b for a, b in zip(found, planned, strict=True))


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
        own = [s for s, owner in enumerate(schedule.placement) if owner == dist.get_rank()]
        pipeline = Pipeline({s: nn.Linear(2, 2) for s in own}, schedule, loss=nn.functional.mse_loss)
        x = torch.ones(5, 200_000, 2)
        return pipeline.step(x, x) is not None

    assert any(sizes[2].run(run))


# PyTorch's own runtime.


def test_gradients_are_those_of_torch_s_pipelining(sizes):
    def both():
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B

        p, m, rank = 3, 6, dist.get_rank()
        schedule = schedules.one_f_one_b(p, m)
        model, theirs = gpt(tied=False), gpt(tied=False)
        stages = own_stages(model, schedule, rank)
        inputs, targets = tokens(m, 0)
        losses = Pipeline(stages, schedule, loss=loss).step(inputs, targets)
        stage = PipelineStage(split(theirs, p)[rank], rank, p, torch.device("cpu"))
        other = Schedule1F1B(stage, m, loss_fn=loss)
        their_losses: list = []
        other.step(*([inputs] if rank == 0 else []), target=targets, losses=their_losses)
        if rank == p - 1:
            assert (losses - torch.stack(their_losses) / m).abs().max() < 1e-12
        return gap(model, theirs, stages)

    assert max(sizes[3].run(both)) < 1e-12


@pytest.mark.parametrize("name", TORCH)
def test_torch_s_own_tables_are_executed(sizes, name):
    assert max(sizes[2].run(trained, torch_schedule(name, 2, 6), 6, steps=1)) < 1e-10


@pytest.mark.parametrize("name", matrix(SCHEDULES, SOME))
def test_torch_s_runtime_executes_our_tables_with_the_same_gradients(sizes, name, tmp_path):
    schedule, file = SCHEDULES[name](2, 6), tmp_path / "schedule.csv"
    file.write_text("\n".join(map(",".join, cells(schedule))), newline="")

    def both():
        from torch.distributed.pipelining.schedules import PipelineStage, _PipelineScheduleRuntime

        rank, last = dist.get_rank(), schedule.stages - 1
        model, theirs = gpt(tied=False), gpt(tied=False)
        stages, others = (own_stages(m, schedule, rank) for m in (model, theirs))
        inputs, targets = tokens(6, 0)
        Pipeline(stages, schedule, loss=loss).step(inputs, targets)
        torch_stages = [PipelineStage(o, s, last + 1, torch.device("cpu")) for s, o in others.items()]
        runtime = _PipelineScheduleRuntime(torch_stages, 6, loss_fn=loss)
        runtime._load_csv(str(file))
        runtime.step(*([inputs] if 0 in stages else []), **({"target": targets} if last in stages else {}))
        return gap(model, theirs, stages)

    assert max(sizes[2].run(both)) < 1e-12


# Held to a set duration.


@pytest.mark.parametrize("name", ["1f1b", "dualpipe-v"])
@pytest.mark.few(1)
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


def test_durations_that_are_too_short_are_refused(sizes):
    with pytest.raises(mr.RankFailed, match="took longer than they may: give longer times"):
        sizes[2].run(paced, schedules.one_f_one_b(2, 3), Times(1e-9, 1e-9, 1e-9))


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
        own = [s for s, owner in enumerate(schedule.placement) if owner == dist.get_rank()]
        kinds = {s: Failing if s == 1 else nn.Identity for s in own}
        pipeline = Pipeline({s: kinds[s](4, 4) for s in own}, schedule, loss=nn.functional.mse_loss)
        x = torch.arange(5.0)[:, None].expand(5, 4)
        pipeline.step(x, x)

    started = time.monotonic()
    with pytest.raises(mr.RankFailed, match="this micro-batch is too large"):
        world.run(run)
    assert time.monotonic() - started < 20
    assert world.run(trained, schedule, 5)[0] < 1e-10


@pytest.mark.parametrize("name", ["1f1b", "zb-v"])
@pytest.mark.few(1)
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
    assert world.run(trained, schedule, 5)[0] < 1e-10


def test_another_shape_in_a_later_step_is_refused(world):
    def run():
        schedule = schedules.one_f_one_b(3, 2)
        pipeline = Pipeline(own_stages(gpt(), schedule, dist.get_rank()), schedule, loss=loss)
        for rows in (2, 4):
            pipeline.step(*tokens(rows, 0))

    with pytest.raises(mr.RankFailed, match="make another Pipeline"):
        world.run(run)


def test_what_cannot_run_is_refused_and_what_is_allowed_is_said(sizes):
    def run():
        schedule = schedules.one_f_one_b(2, 3)
        rank = dist.get_rank()
        stages = own_stages(gpt(), schedule, rank)
        made = partial(Pipeline, schedule=schedule, loss=loss)
        with pytest.raises(ValueError, match=r"is for 3 ranks and the group has 2: make the schedule for p=2"):
            Pipeline(stages, schedules.gpipe(3, 2), loss=loss)
        with pytest.raises(ValueError, match=rf"stages \[5\] given to rank {rank}: 1f1b places \[{rank}\]"):
            made({5: stages[rank]})
        pipeline = made(stages)
        inputs, targets = tokens(2, 0)
        with pytest.raises(ValueError, match="of 2 rows in m=3 micro-batches: each needs one; give 3 or more"):
            pipeline.step(inputs, targets)
        with pytest.raises(ValueError, match="this rank has a stage that needs"):
            pipeline.step()
        if rank == 1:
            with pytest.raises(ValueError, match="give it a loss"):
                Pipeline(stages, schedule)
        broken = schedule.ranks[0][:-1], schedule.ranks[1]
        with pytest.raises(ValueError, match="is missing"):
            made(stages, schedule=type(schedule)("broken", 3, (0, 1), broken))

    sizes[2].run(run)


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


@pytest.mark.parametrize("wrong", [lambda y: (y, y), lambda y: [y]])
def test_a_stage_that_gives_no_tensor_is_refused(sizes, wrong):
    class Wrong(nn.Module):
        def forward(self, x):
            return wrong(x)

    def run():
        pipeline = Pipeline({0: Wrong()}, schedules.naive(1, 1), loss=nn.functional.mse_loss)
        with pytest.raises(ValueError, match="from one tensor to one tensor"):
            pipeline.step(torch.ones(1), torch.ones(1))

    sizes[1].run(run)


def test_a_loss_that_is_no_mean_is_refused(sizes):
    def run():
        by_row = partial(nn.functional.mse_loss, reduction="none")
        pipeline = Pipeline({0: nn.Identity()}, schedules.naive(1, 1), loss=by_row)
        with pytest.raises(ValueError, match="a scalar"):
            pipeline.step(torch.ones(2), torch.ones(2))

    sizes[1].run(run)
