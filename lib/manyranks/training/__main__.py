"""python -m manyranks.training: trains the small GPT on new ranks, or on torchrun's."""

import math
import os
import sys
from pathlib import Path

from manyranks.theory.plan import Plan
from manyranks.training.arguments import checked, parser, refuse_lost_restarts, under_torchrun
from manyranks.training.config import TrainingConfig


def main(arguments: list[str] | None = None) -> None:
    """Runs the command. Wrong arguments end it with status 2, before any process is started."""
    command = parser()
    chosen = command.parse_args(arguments)
    try:
        refuse_lost_restarts()
        gpt, training, ranks = checked(chosen)
        saving = _saving(chosen)
        run = _on_torchruns_ranks if under_torchrun() else _on_own_ranks(ranks, chosen.ray)
    except (ValueError, OSError) as error:
        command.error(str(error))
    from manyranks.training.progress_line import terminal

    result = run(gpt, training, terminal=terminal(), utilization=chosen.mfu, **saving)
    if os.environ.get("RANK", "0") == "0":
        print(_summary(result, training, chosen.checkpoint))


def _saving(chosen) -> dict[str, object]:
    """Returns those of train's arguments that say where to save, and how often."""
    folder, every, keep, hours = chosen.checkpoint, chosen.save_every, chosen.keep, chosen.mtbf
    for option, given in {"--save-every": every, "--keep": keep, "--mtbf": hours}.items():
        if given is not None and folder is None:
            raise ValueError(f"{option} {given}: say with --checkpoint FOLDER where to save")
    if chosen.resume and folder is None:
        raise ValueError("--resume: say with --checkpoint FOLDER where to go on from")
    if every not in (None, "auto"):
        if not every.isdecimal() or int(every) < 1:
            raise ValueError(f"--save-every {every}: give 1 or more steps, or auto")
        every = int(every)
    if keep is not None and keep < 1:
        raise ValueError(f"--keep {keep}: give 1 or more checkpoints")
    if hours is not None and (every != "auto" or not 0 < hours < math.inf):
        raise ValueError(f"--mtbf {hours}: give hours above 0, and --save-every auto")
    if folder is not None:
        Path(folder).mkdir(parents=True, exist_ok=True)
        if not chosen.resume:
            from manyranks.training.trainer import refuse_used

            refuse_used(folder)
    how = {"every": every, "keep": keep, "mtbf": hours and hours * 3600}
    return {"folder": folder, "resume": chosen.resume, **how}


def _on_own_ranks(ranks: int, cluster: str | None):
    """A function that trains on that many, on this machine or on the Ray cluster at this address.

    Raises ValueError where they cannot be.
    """
    from manyranks.training import corpus
    from manyranks.training.trainer import train
    from manyranks.world import World, WorldError

    corpus.text()
    world = World(ranks, timeout=None, engine=_engine(cluster))

    def run(*arguments, **named):
        with world:
            try:
                return world.run(train, *arguments, **named)[0]
            except WorldError as error:
                sys.exit(str(error))

    return run


def _engine(cluster: str | None) -> str:
    if cluster is None:
        return "local"
    try:
        import ray
    except ImportError:
        return "ray"  # the world says what is missing
    try:
        ray.init(address=cluster, logging_level="ERROR", log_to_driver=False)
    except (ConnectionError, ValueError, ray.exceptions.RayError) as error:
        if "AuthenticationError" in repr((error, error.__cause__)):
            raise ValueError(
                f"--ray {cluster}: the cluster wants its token: copy ~/.ray/auth_token of its head "
                "node to this one, and set RAY_AUTH_MODE=token"
            ) from error
        raise ValueError(f"--ray {cluster}: no cluster answers there: {error}") from error
    return "ray"


def _on_torchruns_ranks(*arguments, **named):
    import torch
    import torch.distributed as dist

    from manyranks.training.trainer import train
    from manyranks.world.rank.process import die_with_the_parent

    die_with_the_parent()  # else ranks train on without a torchrun that was killed
    here = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"]))
    backend, gpus = "gloo", torch.cuda.device_count()
    if 0 < gpus < here:
        sys.exit(
            f"{here} ranks for {gpus} GPUs: start one each, or set CUDA_VISIBLE_DEVICES= for CPUs"
        )
    if gpus:
        backend = "cpu:gloo,cuda:nccl"
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", os.environ["RANK"])))
    dist.init_process_group(backend)
    try:
        return train(*arguments, **named)
    finally:
        dist.destroy_process_group()


def _summary(result, training: TrainingConfig, folder: str | None) -> str:
    steps = len(result.losses)
    lines = [
        f"{result.parameters:,} parameters on {result.ranks} rank{'s' if result.ranks > 1 else ''}"
        f"{_axes(training.plan)}; "
        f"{training.batch} sequences a step; loss in nats a byte"
    ]
    if folder and result.every:
        lines.append(f"  saved every {result.every} steps in {folder}")
    if result.first:
        lines.append(f"  goes on after step {result.first}, from the checkpoint in {folder}")
    places = sorted({*range(0, steps, max(1, steps // 6)), steps - 1} if steps else [])
    lines += [f"  step {result.first + i + 1:>6}   {result.losses[i]:.3f}" for i in places]
    lines.append(
        f"  held-out text {result.held_out:.3f}, after {steps} steps in {result.seconds:.1f} s"
    )
    if used := result.utilization:
        lines.append(
            f"  {used.tokens_per_second:,.0f} tokens/s: MFU {used.mfu():.1%}, HFU {used.hfu():.1%} "
            f"(causal) of {used.peak.flops / 1e9:,.0f} GFLOP/s in {used.peak.dtype} "
            f"({used.peak.device}, {used.peak.source})"
        )
    return "\n".join(lines)


def _axes(plan: Plan | None) -> str:
    if plan is None:
        return ""
    degrees = (f"{name} {getattr(plan, name)}" for name in ("dp", "pp", "cp", "tp"))
    return f" ({' · '.join(degrees)}{f', ep {plan.ep}' if plan.ep > 1 else ''})"


if __name__ == "__main__":
    main()
