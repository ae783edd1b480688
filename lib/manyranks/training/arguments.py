"""The command line of a training run: the model, how it is trained, and on how many ranks."""

import argparse
import math
import os
from dataclasses import fields

from manyranks.theory.plan import CONTEXT, SCHEDULES, Plan
from manyranks.training.config import RECOMPUTE, STYLES, GPTConfig, TrainingConfig
from manyranks.training.runnable import check_plan

_ABOUT = """Trains a small GPT to continue Python code. A token is a byte, and the text is the
source of Python's own standard library. The ranks share each batch: data parallelism, and
with --zero more than that. With --tp, --pp, --cp and --ep they share the model and the
sequences, too: dp·pp·cp·tp ranks. The command starts its own ranks; under torchrun it uses
the ranks that are there."""
_RANKS = 4  # of data parallelism alone
# Those of theory's Plan that make a run one of a plan. The others it shares with one of none.
_OF_PLAN = ("tp", "pp", "cp", "ep", "etp", "dp_shard", "microbatch", "schedule", "virtual")
_OF_PLAN += ("sequence_parallel", "context", "embedding_slots")
_USUAL = {field.name: field.default for field in fields(Plan)}


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser("python -m manyranks.training", description=_ABOUT)
    _add_ranks(made)
    _add_training(made)
    _add_gpt(made)
    made.add_argument("--checkpoint", metavar="FOLDER", help="save there at the end")
    made.add_argument(
        "--save-every",
        metavar="N",
        help="save each N steps, too, while training goes on; auto: as often as loses least time",
    )
    made.add_argument(
        "--mtbf",
        type=float,
        metavar="HOURS",
        help="with auto: mean time between two failures of the run (as Llama 3's GPUs failed)",
    )
    made.add_argument("--keep", type=int, metavar="N", help="checkpoints that stay there (all)")
    made.add_argument(
        "--resume",
        action="store_true",
        help="go on from the newest checkpoint in FOLDER, whatever ranks have written it",
    )
    made.add_argument(
        "--mfu", action="store_true", help="say how much of the ranks' FLOP/s the run has used"
    )
    made.add_argument(
        "--ray",
        metavar="ADDRESS",
        help="ranks on the nodes of the Ray cluster there; auto: the one of this machine",
    )
    return made


def checked(chosen: argparse.Namespace) -> tuple[GPTConfig, TrainingConfig, int]:
    """Returns the configurations and the number of ranks. Raises ValueError for what cannot be."""
    gpt = GPTConfig(
        layers=chosen.layers,
        hidden=chosen.hidden,
        heads=chosen.heads,
        seq=chosen.seq,
        dropout=chosen.dropout,
        style=chosen.style,
        tied=chosen.tied,
        experts=chosen.experts,
    )
    plan = _plan(chosen)
    training = TrainingConfig(
        steps=chosen.steps,
        batch=chosen.batch,
        accumulate=chosen.accumulate,
        learning_rate=chosen.lr,
        warmup=chosen.warmup,
        bf16=chosen.bf16 and plan is None,
        seed=chosen.seed,
        zero=chosen.zero,
        recompute=chosen.recompute,
        plan=plan,
    )
    if plan is not None:
        check_plan(gpt, plan)
        return gpt, training, plan.gpus
    ranks = _ranks(chosen.dp)
    training.check_ranks(ranks)
    return gpt, training, ranks


def under_torchrun() -> bool:
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def refuse_lost_restarts() -> None:
    """Raises ValueError if ranks that torchrun restarts would look for dead ones.

    PyTorch 2.13's torchrun keeps one store across restarts unless it is told otherwise: issue
    135712 of pytorch/pytorch.
    """
    restarts = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")
    if restarts != "0" and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        raise ValueError(
            f"torchrun --max-restarts {restarts}: ranks that start again would look for dead ones. "
            "Set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 where you call torchrun, and give it "
            "--rdzv-backend c10d; CLUSTERS.md has the whole command"
        )


def _plan(chosen: argparse.Namespace) -> Plan | None:
    """Returns the plan, or None where nothing but data parallelism was asked for."""
    values = {name: getattr(chosen, name) for name in _OF_PLAN}
    if all(value == _USUAL[name] for name, value in values.items()):
        return None
    others = [max(1, degree) for degree in (chosen.tp, chosen.pp, chosen.cp)]
    return Plan(
        dp=_dp(chosen.dp, others),
        seq=chosen.seq,
        batch=chosen.batch,
        zero=chosen.zero,
        recompute=chosen.recompute,
        precision="bf16" if chosen.bf16 else "fp32",
        **values,
    )


def _dp(given: int | None, others: list[int]) -> int:
    """The data-parallel degree beside the others; under torchrun it follows from these."""
    if not under_torchrun():
        return given if given is not None else 1 if math.prod(others) > 1 else _RANKS
    there, each = int(os.environ["WORLD_SIZE"]), math.prod(others)
    if given is None and there % each == 0:
        return there // each
    if given is None or given * each != there:
        product = "·".join(map(str, ([] if given is None else [given]) + others))
        axes = "tp·pp·cp" if given is None else "dp·tp·pp·cp"
        allowed = f"a divisor of {there}" if given is None else f"{there}, or leave --dp out"
        raise ValueError(
            f"{axes} = {product} = {each * (given or 1)}, and torchrun started {there} ranks: "
            f"choose degrees whose product is {allowed}"
        )
    return given


def _ranks(dp: int | None) -> int:
    if dp is not None and dp < 1:
        raise ValueError(f"--dp {dp}: the number of ranks must be 1 or more")
    if not under_torchrun():
        return _RANKS if dp is None else dp
    there = int(os.environ["WORLD_SIZE"])
    if dp not in (None, there):
        raise ValueError(f"--dp {dp}: torchrun started {there} ranks; leave --dp out")
    return there


def _number(made: argparse._ActionsContainer, name: str, default: float, text: str) -> None:
    made.add_argument(
        name, type=type(default), default=default, metavar="N", help=f"{text} ({default})"
    )


def _choice(made: argparse._ActionsContainer, name: str, known: tuple, default: str, text: str):
    made.add_argument(name, choices=known, default=default, help=f"{text} ({default})")


def _add_ranks(made: argparse.ArgumentParser) -> None:
    group = made.add_argument_group("ranks and axes")
    group.add_argument(
        "--dp",
        type=int,
        metavar="N",
        help=f"data parallelism: ranks with other sequences ({_RANKS}, with other axes 1; under "
        "torchrun, what these leave of its ranks)",
    )
    _number(group, "--tp", 1, "tensor parallelism: ranks that share each layer's matrices")
    _number(group, "--pp", 1, "pipeline parallelism: ranks with other layers")
    _number(group, "--cp", 1, "context parallelism: ranks that share each sequence")
    _number(group, "--ep", 1, "expert parallelism: ranks of dp·cp that share the experts")
    group.add_argument(
        "--etp",
        type=int,
        metavar="N",
        help="ranks that cut each expert; then experts share all dp·cp·tp ranks (whole experts)",
    )
    group.add_argument(
        "--zero",
        type=int,
        choices=range(4),
        default=0,
        help="what data-parallel ranks share out: 1 the optimizer's states, 2 also gradients, "
        "3 also parameters (0)",
    )
    group.add_argument(
        "--dp-shard", type=int, metavar="N", help="data-parallel ranks that share one copy (all)"
    )
    _number(group, "--microbatch", 1, "sequences a rank takes at a time, with other axes")
    _choice(group, "--schedule", SCHEDULES, _USUAL["schedule"], "of the pipeline")
    _number(group, "--virtual", 1, "stages a pipeline rank has, interleaved")
    _choice(group, "--context", CONTEXT, _USUAL["context"], "how keys and values travel")
    group.add_argument(
        "--no-sequence-parallel",
        dest="sequence_parallel",
        action="store_false",
        help="tensor-parallel ranks have whole sequences between matrices",
    )
    group.add_argument(
        "--embedding-slots",
        action="store_true",
        help="the first and the last stage have a layer less each, for embedding and head",
    )


def _add_training(made: argparse.ArgumentParser) -> None:
    group, usual = made.add_argument_group("training"), TrainingConfig()
    _number(group, "--steps", usual.steps, "steps of the whole run")
    _number(group, "--batch", usual.batch, "sequences of a step, over all ranks")
    _number(group, "--accumulate", usual.accumulate, "micro-batches that a rank's part is cut into")
    _choice(
        group,
        "--recompute",
        RECOMPUTE,
        usual.recompute,
        "what backward computes again, to save memory: selective attention's core, full each layer",
    )
    _number(group, "--lr", usual.learning_rate, "highest learning rate")
    _number(group, "--warmup", usual.warmup, "steps until it is reached")
    _number(group, "--seed", usual.seed, "of the first weights and of dropout")
    group.add_argument(
        "--bf16",
        action="store_true",
        help="matrix products in bfloat16; with other axes the model, with masters in float32",
    )


def _add_gpt(made: argparse.ArgumentParser) -> None:
    group, usual = made.add_argument_group("model"), GPTConfig()
    _number(group, "--layers", usual.layers, "layers of the model")
    _number(group, "--hidden", usual.hidden, "numbers that stand for a token between layers")
    _number(group, "--heads", usual.heads, "attention heads")
    _number(group, "--seq", usual.seq, "bytes of a sequence")
    _number(group, "--experts", usual.experts, "experts of each layer; 0: one MLP")
    _number(group, "--dropout", usual.dropout, "share of activations that are left out at random")
    _choice(group, "--style", STYLES, usual.style, "kind of the model")
    group.add_argument(
        "--untied", dest="tied", action="store_false", help="the head has its own matrix"
    )
