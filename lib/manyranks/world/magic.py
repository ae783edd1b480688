"""%%ranks: runs a cell on every rank of the newest open world."""

import contextlib
import re
import time

from manyranks.world import cells, limits
from manyranks.world.errors import WorldError
from manyranks.world.processes.local import the_forkserver
from manyranks.world.world import newest

_USAGE = (
    "use %%ranks, or %%ranks 0,2 for some of the ranks. Behind the ranks, --time; or --measure NAME, with --flops or --memory "
    "to count these, too, or --profile"
)
_LINE = re.compile(
    r"\s*(?P<ranks>\d+(\s*,\s*\d+)*)?\s*((?P<time>--time)|--measure\s+(?P<name>[A-Za-z_]\w*)"
    r"(?P<counts>(\s+--(flops|memory|profile))*))?\s*"
)


def load(shell) -> None:
    """Adds the magic to an IPython shell, with Tab for its names, and starts the forkserver in the background."""
    limits.check_place()
    shell.Completer.custom_matchers.append(_completes())

    def ranks(line: str, cell: str) -> None:
        """Runs the cell on every rank of the newest open world: %%ranks; or on some of them: %%ranks 0,2.

        Behind the ranks, --time prints how long it took. --measure NAME counts as world.measure does and keeps that as NAME,
        with --flops or --memory to count these, too, or --profile.
        """
        _ranks(shell, line, cell)

    shell.register_magic_function(ranks, "cell", "ranks")
    the_forkserver()


def _ranks(shell, line: str, cell: str) -> None:
    options = _LINE.fullmatch(line)
    if options is None:
        raise WorldError(f"%%ranks {line.strip()}: {_USAGE}")
    chosen = [int(rank) for rank in options["ranks"].split(",")] if options["ranks"] else None
    name = f"<cell {cells.current_number() or shell.execution_count}>"
    source = "\n" + cell  # the line with %%ranks counts, so that numbers agree with what the reader sees
    cells.remember(name, f"%%ranks{line}\n{cell}")
    world = newest()
    try:
        world.checked_ranks(chosen)
    except ValueError as error:
        raise WorldError(f"%%ranks {line.strip()}: {error}") from None  # without the frames of this library
    compile(source, name, "exec")  # a slip of the pen is a SyntaxError here, not one from each rank
    if options["time"]:
        started = time.perf_counter()
        each = world.time_cell(source, name, chosen)
        ranks = ", ".join(f"rank {rank}: {1e3 * seconds:.3g} ms" for rank, seconds in each.items())
        print(f"{1e3 * (time.perf_counter() - started):.3g} ms in all; {ranks}")
    elif options["name"] is None:
        world.run_cell(source, name, chosen)
    else:
        counts = {what: f"--{what}" in options["counts"].split() for what in ("flops", "memory", "profile")}
        shell.user_ns[options["name"]] = world.measure_cell(source, name, chosen, **counts)


def _completes():
    """Makes the matcher that answers Tab in a cell of %%ranks with names that exist on the ranks."""
    from IPython.core.completer import SimpleCompletion, context_matcher

    @context_matcher(identifier="manyranks")
    def names(context):
        found = []
        if context.full_text.startswith("%%ranks"):
            with contextlib.suppress(WorldError):
                found = newest().names(context.token)
        return {"completions": [SimpleCompletion(text=name, type="rank") for name in found]}

    return names
