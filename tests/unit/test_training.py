"""The trainer's parts that need no ranks: settings, learning rate, weight decay, progress bar, the command's arguments."""

import io
import math
import os
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from manyranks import theory
from manyranks.training import progress_line
from manyranks.training.__main__ import main
from manyranks.training.arguments import checked, parser
from manyranks.training.config import GPTConfig, TrainingConfig
from manyranks.training.parallelize import parallelize
from manyranks.training.trainer import learning_rate, train


def test_the_learning_rate_rises_in_a_line_and_falls_by_a_cosine_to_a_tenth():
    training = TrainingConfig(steps=101, warmup=20, learning_rate=1.0)
    rates = [learning_rate(step, training) for step in range(101)]
    assert rates[:20] == pytest.approx([(i + 1) / 20 for i in range(20)])
    assert rates[20] == max(rates) == 1.0
    assert rates[60] == pytest.approx(0.55)
    assert rates[40] == pytest.approx(0.1 + 0.9 * (1 + math.cos(math.pi / 4)) / 2)
    assert rates[100] == pytest.approx(0.1)
    assert learning_rate(500, training) == pytest.approx(0.1)


@pytest.mark.parametrize(("steps", "warmup"), [(1, 0), (1, 50), (50, 50), (51, 50), (10, 0)])
def test_a_short_run_has_a_learning_rate_at_each_step(steps, warmup):
    training = TrainingConfig(steps=steps, warmup=warmup)
    assert all(0 < learning_rate(step, training) <= training.learning_rate for step in range(steps))


def test_weight_decay_is_on_matrices_only():
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.LayerNorm(3))
    optimizer = parallelize(model, TrainingConfig(learning_rate=0.5, weight_decay=0.1)).optimizer
    before = [parameter.detach().clone() for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    kept = [after / was for after, was in zip(model.parameters(), before, strict=True)]
    torch.testing.assert_close(kept[0], torch.full((3, 2), 0.95))
    assert all(torch.equal(after, was) for after, was in list(zip(model.parameters(), before, strict=True))[1:])


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"steps": 0}, "steps=0: must be a whole number, 1 or more"),
        ({"batch": 2.0}, "batch=2.0: must be a whole number, 1 or more"),
        ({"warmup": -1}, "warmup=-1: must be a whole number, 0 or more"),
        ({"learning_rate": 0.0}, "learning_rate=0.0: must be above 0"),
        ({"clip": math.nan}, "clip=nan: must be above 0"),
        ({"weight_decay": -0.1}, "weight_decay=-0.1: must be 0 or more"),
        ({"zero": 4}, "zero=4: the stages are 0, 1, 2 and 3"),
        ({"zero": -1}, "zero=-1: must be a whole number, 0 or more"),
        ({"recompute": "ful"}, "recompute='ful': did you mean 'full'"),
    ],
)
def test_settings_that_cannot_be_are_refused(wrong, said):
    with pytest.raises(ValueError, match=said):
        TrainingConfig(**wrong)


def test_a_batch_that_leaves_a_rank_without_work_is_refused():
    training = TrainingConfig(batch=11, accumulate=3)
    training.check_ranks(3)
    with pytest.raises(ValueError, match="batch=11: 4 ranks with 3 micro-batches each need 12"):
        training.check_ranks(4)


def test_the_feed_forward_size_follows_the_others_where_it_is_left_out():
    assert GPTConfig(hidden=192).shape().ffn == 512
    assert GPTConfig(hidden=192, style="gpt2").shape().ffn == 768
    assert replace(GPTConfig(), hidden=256).shape().ffn == 704
    assert GPTConfig(ffn=40).shape().ffn == 40


# The progress bar


def test_the_line_says_how_far_the_run_is():
    assert progress_line.line(60, 120, 2.5, 9.87) == "━" * 12 + "─" * 12 + " step 60/120  2.500 nats a byte  9.9 steps/s "


@pytest.fixture
def terminal():
    """The name of a terminal, and a function that reads what was written to it, to the end of a line."""
    ours, theirs = os.openpty()

    def read() -> str:
        text = ""
        while not text.endswith("\n"):
            text += os.read(ours, 10_000).decode()
        return text

    yield os.ttyname(theirs), read
    os.close(ours)
    os.close(theirs)


def test_the_bar_rewrites_one_line_on_the_terminal_it_is_given(terminal):
    name, read = terminal
    with progress_line.bar(name, 2) as report:
        report(1, 3.0)
        report(2, 2.5)
    text = read()
    assert text.startswith("\r")
    assert "step 2/2  2.500 nats a byte" in text
    assert text.strip("\r\n").count("\n") == 0


def test_the_rate_of_a_resumed_run_is_that_of_its_own_steps(terminal, monkeypatch):
    name, read = terminal
    seconds = iter(range(100))
    monkeypatch.setattr(progress_line.time, "perf_counter", lambda: float(next(seconds)))
    with progress_line.bar(name, 200) as report:
        report(101, 2.0)
        report(102, 2.0)
    assert read().count(" 1.0 steps/s") == 2


def test_there_is_no_bar_where_nobody_would_see_it(monkeypatch):
    monkeypatch.setattr("sys.stderr", io.StringIO())
    assert progress_line.terminal() is None
    with progress_line.bar(None, 2) as report:
        assert report is None


# The command


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (["--dp", "0"], "--dp 0: the number of ranks must be 1 or more"),
        (["--dp", "6", "--batch", "4"], "batch=4: 6 ranks"),
        (["--heads", "3"], "heads=3 does not divide hidden=128"),
        (["--steps", "0"], "steps=0: must be a whole number"),
        (["--steps", "many"], "invalid int value: 'many'"),
        (["--style", "bert"], "invalid choice: 'bert'"),
        (["--zero", "4"], "argument --zero: invalid choice"),
        (["--recompute", "all"], "invalid choice: 'all'"),
        (["--save-every", "5"], "--save-every 5: say with --checkpoint FOLDER where to save"),
        (["--save-every", "0", "--checkpoint", "."], "--save-every 0: give 1 or more steps, or auto"),
        (["--save-every", "often", "--checkpoint", "."], "--save-every often: give 1 or more steps, or auto"),
        (["--keep", "0", "--checkpoint", "."], "--keep 0: give 1 or more checkpoints"),
        (["--mtbf", "3", "--save-every", "5", "--checkpoint", "."], "--mtbf 3.0: give hours above 0, and --save-every auto"),
        (["--mtbf", "0", "--save-every", "auto", "--checkpoint", "."], "--mtbf 0.0: give hours above 0"),
        (["--resume"], "say with --checkpoint FOLDER"),
        (["--checkpoint", "/dev/null/x"], "Not a directory"),
        (["--dp", "100000", "--batch", "100000"], "ranks fit"),
        (["--cp", "0"], "cp=0: must be a whole number, 1 or more"),
        (["--tp", "3"], "tp=3 does not divide the 4 heads of small llama: choose a divisor"),
        (["--pp", "8"], "4 layers of small llama on 8 stages: lower pp=8"),
        (["--dp", "3", "--tp", "2"], "batch=16 is not a multiple of dp·microbatch = 3·1 = 3: give 15 or 18"),
        (["--dp", "2", "--ep", "2"], "ep=2: small llama has no experts; say ep=1"),
        (["--pp", "2", "--zero", "3"], "zero=3 with pp=2: the first and the last stage share the embedding"),
        (["--tp", "2", "--accumulate", "3"], "accumulate=3 with a plan, which says 16: leave accumulate out"),
        (["--pp", "2", "--schedule", "1f2b"], "invalid choice: '1f2b'"),
        (["--tp", "2", "--pp", "2", "--dp", "1000", "--batch", "1000"], "ranks fit"),
    ],
)
def test_wrong_arguments_end_the_command_before_any_process_starts(wrong, said, monkeypatch, capsys):
    from manyranks.world import world

    monkeypatch.setattr(world, "Team", None)
    with pytest.raises(SystemExit) as ended:
        main(wrong)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_dp_must_be_what_torchrun_started(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit):
        main(["--dp", "3"])
    assert "--dp 3: torchrun started 2 ranks; leave --dp out" in capsys.readouterr().err


@pytest.mark.parametrize(("restarts", "store", "refused"), [("3", "True", True), ("3", "False", False), ("0", "True", False)])
def test_restarts_that_would_look_for_dead_ranks_are_refused(restarts, store, refused, monkeypatch, capsys):
    there = {"RANK": "0", "WORLD_SIZE": "2", "TORCHELASTIC_MAX_RESTARTS": restarts, "TORCHELASTIC_USE_AGENT_STORE": store}
    for name, value in there.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit):
        main(["--dp", "3"])
    said = "--max-restarts 3: ranks that start again" if refused else "--dp 3: torchrun started 2 ranks"
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("hidden", [False, True], ids=["raised", "its cause"])
def test_a_ray_cluster_that_wants_a_token_says_what_to_do(hidden, monkeypatch, capsys):
    """Ray raises this error, or a ConnectionError that it caused."""

    class RayError(Exception):
        pass

    class AuthenticationError(RayError):
        pass

    def init(**_):
        if hidden:
            raise ConnectionError("Failed to connect") from AuthenticationError()
        raise AuthenticationError

    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(init=init, exceptions=SimpleNamespace(RayError=RayError)))
    with pytest.raises(SystemExit):
        main(["--dp", "2", "--ray", "node0:6379"])
    assert "--ray node0:6379: the cluster wants its token: copy ~/.ray/auth_token" in capsys.readouterr().err


AXES = ["--tp", "2", "--pp", "2", "--cp", "2"]
OTHERS = ["--virtual", "2", "--microbatch", "2", "--zero", "1", "--no-sequence-parallel", "--context", "ulysses", "--bf16"]


def test_degrees_and_their_companions_are_a_plan():
    gpt, training, ranks = checked(parser().parse_args([*AXES, *OTHERS, "--dp", "2"]))
    wanted = theory.Plan(
        dp=2,
        pp=2,
        cp=2,
        tp=2,
        seq=gpt.seq,
        batch=16,
        microbatch=2,
        virtual=2,
        sequence_parallel=False,
        zero=1,
        recompute="none",
        precision="bf16",
        context="ulysses",
    )
    assert (training.plan, ranks) == (wanted, 16)
    assert (training.batch, training.accumulate, training.zero, training.bf16) == (16, 4, 1, False)


@pytest.mark.parametrize(
    ("there", "dp", "left"), [(None, [], 1), (None, ["--dp", "3"], 3), (8, [], 1), (16, [], 2), (16, ["--dp", "2"], 2)]
)
def test_dp_is_what_torchruns_ranks_leave_for_it(there, dp, left, monkeypatch):
    if there:
        monkeypatch.setenv("RANK", "0")
        monkeypatch.setenv("WORLD_SIZE", str(there))
    _, training, ranks = checked(parser().parse_args([*AXES, *dp, "--batch", "12"]))
    assert (training.plan.dp, ranks) == (left, 8 * left)


@pytest.mark.parametrize(
    ("dp", "said"),
    [
        ([], "tp·pp·cp = 2·2·2 = 8, and torchrun started 12 ranks: choose degrees whose product is a divisor of 12"),
        (["--dp", "2"], "dp·tp·pp·cp = 2·2·2·2 = 16, and torchrun started 12 ranks: choose degrees whose product is 12, or"),
    ],
)
def test_degrees_must_make_up_torchruns_ranks(dp, said, monkeypatch, capsys):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "12")
    with pytest.raises(SystemExit) as ended:
        main([*AXES, *dp])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_a_vocabulary_without_a_place_for_each_byte_is_refused():
    with pytest.raises(ValueError, match="vocab=50: the corpus has 256 tokens"):
        train(GPTConfig(vocab=50), TrainingConfig())


@pytest.mark.parametrize("given", [{"every": 5}, {"keep": 2}, {"every": "auto", "mtbf": 60.0}])
def test_how_to_save_without_a_folder_is_refused(given):
    with pytest.raises(ValueError, match="without a folder: say with folder where to save"):
        train(GPTConfig(), TrainingConfig(), **given)


def test_a_rate_of_failures_that_nothing_uses_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r'mtbf=60\.0 with every=5: say every="auto", or leave mtbf out'):
        train(GPTConfig(), TrainingConfig(), str(tmp_path), every=5, mtbf=60.0)


@pytest.mark.parametrize("every", [0, -1, True])
def test_a_run_that_would_never_end_is_refused(every):
    with pytest.raises(ValueError, match=f"every={every}: give a number of steps, 1 or more"):
        train(GPTConfig(), TrainingConfig(), every=every)


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ({"betas": (2, 3)}, r"betas=\(2, 3\): give two numbers"),
        ({"learning_rate": float("inf")}, "learning_rate=inf"),
        ({"bf16": True, "plan": theory.Plan(tp=2, precision="bf16")}, "bf16=True with a plan: say precision='bf16'"),
    ],
)
def test_what_cannot_train_is_refused(how, says):
    with pytest.raises(ValueError, match=says):
        TrainingConfig(**how)


@pytest.mark.parametrize(
    "options", [["--microbatch", "2"], ["--zero", "3", "--dp-shard", "2"], ["--ep", "4", "--experts", "8"]]
)
def test_what_is_no_degree_beside_dp_leaves_its_four_ranks(options):
    assert checked(parser().parse_args(options))[2] == 4


def test_resume_needs_a_folder():
    with pytest.raises(ValueError, match="resume=True: say with folder"):
        train(GPTConfig(), TrainingConfig(), resume=True)
