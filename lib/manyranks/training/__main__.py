"""python -m manyranks.training: trains the small GPT on ranks of its own, or on torchrun's."""

import argparse
import os
import sys
from pathlib import Path

from manyranks.training.config import RECOMPUTE, STYLES, GPTConfig, TrainingConfig

_ABOUT = """Trains a small GPT to continue Python code. A token is a byte, and the text is the
source of Python's own standard library. The ranks share each batch: data parallelism, and
with --zero more than that. The command starts its own ranks; under torchrun it uses the ranks
that are there."""
_RANKS = 4


def main(arguments: list[str] | None = None) -> None:
    """The command. Wrong arguments end it with status 2, before any process is started."""
    parser = _parser()
    chosen = parser.parse_args(arguments)
    try:
        gpt, training, ranks = _checked(chosen)
        folder = _folder(chosen.checkpoint, chosen.resume)
        every = _every(chosen.every, folder)
        run = _on_torchruns_ranks if _under_torchrun() else _on_own_ranks(ranks)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    from manyranks.training.progress import terminal

    result = run(gpt, training, folder, every, chosen.resume, terminal(), chosen.mfu)
    if os.environ.get("RANK", "0") == "0":
        print(_summary(result, training))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m manyranks.training", description=_ABOUT)
    gpt, training = GPTConfig(), TrainingConfig()

    def number(name: str, default: float, text: str) -> None:
        parser.add_argument(
            name, type=type(default), default=default, metavar="N", help=f"{text} ({default})"
        )

    parser.add_argument(
        "--dp", type=int, metavar="N", help=f"ranks ({_RANKS}; under torchrun, those there are)"
    )
    parser.add_argument(
        "--zero",
        type=int,
        choices=range(4),
        default=training.zero,
        help="what ranks share out: 1 the optimizer's states, 2 also gradients, "
        f"3 also parameters ({training.zero})",
    )
    parser.add_argument(
        "--recompute",
        choices=RECOMPUTE,
        default=training.recompute,
        help="what backward computes again, to save memory: selective attention's core, "
        f"full each layer ({training.recompute})",
    )
    number("--steps", training.steps, "steps of the whole run")
    number("--batch", training.batch, "sequences of a step, over all ranks")
    number("--accumulate", training.accumulate, "micro-batches that a rank's part is cut into")
    number("--lr", training.learning_rate, "highest learning rate")
    number("--warmup", training.warmup, "steps until it is reached")
    number("--layers", gpt.layers, "layers of the model")
    number("--hidden", gpt.hidden, "numbers that stand for a token between layers")
    number("--heads", gpt.heads, "attention heads")
    number("--seq", gpt.seq, "bytes of a sequence")
    number("--dropout", gpt.dropout, "share of activations that are left out at random")
    number("--seed", training.seed, "of the first weights and of dropout")
    parser.add_argument(
        "--style", choices=STYLES, default=gpt.style, help=f"kind of the model ({gpt.style})"
    )
    parser.add_argument("--bf16", action="store_true", help="matrix products in bfloat16")
    parser.add_argument("--checkpoint", metavar="FOLDER", help="save there at the end")
    parser.add_argument("--every", type=int, metavar="N", help="save each N steps, too")
    parser.add_argument(
        "--resume", action="store_true", help="go on from the newest checkpoint in FOLDER"
    )
    parser.add_argument(
        "--mfu", action="store_true", help="say how much of the ranks' FLOP/s the run has used"
    )
    return parser


def _checked(chosen: argparse.Namespace) -> tuple[GPTConfig, TrainingConfig, int]:
    gpt = GPTConfig(
        layers=chosen.layers,
        hidden=chosen.hidden,
        heads=chosen.heads,
        seq=chosen.seq,
        dropout=chosen.dropout,
        style=chosen.style,
    )
    training = TrainingConfig(
        steps=chosen.steps,
        batch=chosen.batch,
        accumulate=chosen.accumulate,
        learning_rate=chosen.lr,
        warmup=chosen.warmup,
        bf16=chosen.bf16,
        seed=chosen.seed,
        zero=chosen.zero,
        recompute=chosen.recompute,
    )
    ranks = _ranks(chosen.dp)
    training.check_ranks(ranks)
    return gpt, training, ranks


def _ranks(dp: int | None) -> int:
    if dp is not None and dp < 1:
        raise ValueError(f"--dp {dp}: the number of ranks must be 1 or more")
    if not _under_torchrun():
        return _RANKS if dp is None else dp
    there = int(os.environ["WORLD_SIZE"])
    if dp not in (None, there):
        raise ValueError(f"--dp {dp}: torchrun started {there} ranks; leave --dp out")
    return there


def _folder(name: str | None, resume: bool) -> str | None:
    if name is None:
        if resume:
            raise ValueError("--resume: say with --checkpoint FOLDER where to go on from")
        return None
    Path(name).mkdir(parents=True, exist_ok=True)
    return name


def _every(steps: int | None, folder: str | None) -> int | None:
    if steps is not None and (steps < 1 or folder is None):
        raise ValueError(f"--every {steps}: give 1 or more steps, and --checkpoint FOLDER")
    return steps


def _under_torchrun() -> bool:
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def _on_own_ranks(ranks: int):
    """A function that trains on that many. Raises ValueError where they cannot be."""
    from manyranks.training import corpus
    from manyranks.training.trainer import train
    from manyranks.world import World, WorldError

    corpus.text()
    world = World(ranks, timeout=None)

    def run(*arguments):
        with world:
            try:
                return world.run(train, *arguments)[0]
            except WorldError as error:
                sys.exit(str(error))

    return run


def _on_torchruns_ranks(*arguments):
    import torch
    import torch.distributed as dist

    from manyranks.training.trainer import train

    here = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"]))
    backend = "gloo"
    if torch.cuda.device_count() >= here:
        backend = "cpu:gloo,cuda:nccl"
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", os.environ["RANK"])))
    dist.init_process_group(backend)
    try:
        return train(*arguments)
    finally:
        dist.destroy_process_group()


def _summary(result, training: TrainingConfig) -> str:
    steps = len(result.losses)
    lines = [
        f"{result.parameters:,} parameters on {result.ranks} ranks; "
        f"{training.batch} sequences a step; loss in nats a byte"
    ]
    places = sorted({*range(0, steps, max(1, steps // 6)), steps - 1} if steps else [])
    lines += [f"  step {result.first + i + 1:>6}   {result.losses[i]:.3f}" for i in places]
    lines.append(
        f"  held-out text {result.held_out:.3f}, after {steps} steps in {result.seconds:.1f} s"
    )
    if used := result.utilisation:
        lines.append(
            f"  {used.tokens_per_second:,.0f} tokens/s: MFU {used.mfu():.1%}, HFU {used.hfu():.1%} "
            f"of {used.peak.flops / 1e9:,.0f} GFLOP/s in {used.peak.dtype} ({used.peak.device}, "
            f"{used.peak.source})"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
