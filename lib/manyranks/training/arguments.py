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
    _add(made, "--checkpoint", "save there at the end", metavar="FOLDER")
    text = "save each N steps, too, while training goes on; auto: as often as loses least time"
    _add(made, "--save-every", text)
    text = "with auto: mean time between two failures of the run (as Llama 3's GPUs failed)"
    _add(made, "--mtbf", text, type=float, metavar="HOURS")
    _add(made, "--keep", "checkpoints that stay there (all)", type=int)
    text = "go on from the newest checkpoint in FOLDER, whatever ranks have written it"
    _add(made, "--resume", text, action="store_true")
    text = "say how much of the ranks' FLOP/s the run has used"
    _add(made, "--mfu", text, action="store_true")
    text = "ranks on the nodes of the Ray cluster there; auto: the one of this machine"
    _add(made, "--ray", text, metavar="ADDRESS")
    return made


def checked(chosen: argparse.Namespace) -> tuple[GPTConfig, TrainingConfig, int]:
    """Returns the configurations and the number of ranks. Raises ValueError for what cannot be."""
    gpt, plan = _taken(GPTConfig, chosen), _plan(chosen)
    training = _taken(TrainingConfig, chosen, bf16=chosen.bf16 and plan is None, plan=plan)
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


def _taken(kind: type, chosen: argparse.Namespace, **others: object):
    """Makes a configuration of the options that are called as its fields are."""
    names = {field.name for field in fields(kind)} & vars(chosen).keys()
    return kind(**{name: getattr(chosen, name) for name in names} | others)


def _add(made: argparse._ActionsContainer, name: str, text: str, usual=None, **how) -> None:
    """Adds an option. One with a usual value has its type, and names it at the end of its help."""
    if usual is not None:
        how |= {"type": type(usual), "default": usual}
        text = f"{text} ({usual})"
    if not how.keys() & {"action", "choices"}:
        how.setdefault("metavar", "N")
    made.add_argument(name, help=text, **how)


def _add_ranks(made: argparse.ArgumentParser) -> None:
    group = made.add_argument_group("ranks and axes")
    text = f"data parallelism: ranks with other sequences ({_RANKS}, with other axes 1; under "
    _add(group, "--dp", text + "torchrun, what these leave of its ranks)", type=int)
    _add(group, "--tp", "tensor parallelism: ranks that share each layer's matrices", 1)
    _add(group, "--pp", "pipeline parallelism: ranks with other layers", 1)
    _add(group, "--cp", "context parallelism: ranks that share each sequence", 1)
    _add(group, "--ep", "expert parallelism: ranks of dp·cp that share the experts", 1)
    text = "ranks that cut each expert; then experts share all dp·cp·tp ranks (whole experts)"
    _add(group, "--etp", text, type=int)
    text = "what data-parallel ranks share out: 1 the optimizer's states, 2 also gradients, 3 also "
    _add(group, "--zero", text + "parameters", 0, choices=range(4))
    _add(group, "--dp-shard", "data-parallel ranks that share one copy (all)", type=int)
    _add(group, "--microbatch", "sequences a rank takes at a time, with other axes", 1)
    _add(group, "--schedule", "of the pipeline", _USUAL["schedule"], choices=SCHEDULES)
    _add(group, "--virtual", "stages a pipeline rank has, interleaved", 1)
    _add(group, "--context", "how keys and values travel", _USUAL["context"], choices=CONTEXT)
    text = "tensor-parallel ranks have whole sequences between matrices"
    off = {"dest": "sequence_parallel", "action": "store_false"}
    _add(group, "--no-sequence-parallel", text, **off)
    text = "the first and the last stage have a layer less each, for embedding and head"
    _add(group, "--embedding-slots", text, action="store_true")


def _add_training(made: argparse.ArgumentParser) -> None:
    group, usual = made.add_argument_group("training"), TrainingConfig()
    _add(group, "--steps", "steps of the whole run", usual.steps)
    _add(group, "--batch", "sequences of a step, over all ranks", usual.batch)
    _add(group, "--accumulate", "micro-batches that a rank's part is cut into", usual.accumulate)
    text = "what backward computes again, to save memory: selective attention's core, full each "
    _add(group, "--recompute", text + "layer", usual.recompute, choices=RECOMPUTE)
    _add(group, "--lr", "highest learning rate", usual.learning_rate, dest="learning_rate")
    _add(group, "--warmup", "steps until it is reached", usual.warmup)
    _add(group, "--seed", "of the first weights and of dropout", usual.seed)
    text = "matrix products in bfloat16; with other axes the model, with masters in float32"
    _add(group, "--bf16", text, action="store_true")


def _add_gpt(made: argparse.ArgumentParser) -> None:
    group, usual = made.add_argument_group("model"), GPTConfig()
    _add(group, "--layers", "layers of the model", usual.layers)
    _add(group, "--hidden", "numbers that stand for a token between layers", usual.hidden)
    _add(group, "--heads", "attention heads", usual.heads)
    _add(group, "--seq", "bytes of a sequence", usual.seq)
    _add(group, "--experts", "experts of each layer; 0: one MLP", usual.experts)
    _add(group, "--dropout", "share of activations that are left out at random", usual.dropout)
    _add(group, "--style", "kind of the model", usual.style, choices=STYLES)
    _add(group, "--untied", "the head has its own matrix", dest="tied", action="store_false")
