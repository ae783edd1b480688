"""%%ranks: runs a cell on every rank of the newest open world."""

import re

from manyranks.world import cells, limits
from manyranks.world.errors import WorldError
from manyranks.world.local import the_forkserver
from manyranks.world.recording import wanted
from manyranks.world.world import newest

_USAGE = "use %%ranks, %%ranks 0,2 or %%ranks --measure NAME (with --flops or --memory, to count these, too, or --profile)"
_LINE = re.compile(
    r"\s*(?P<ranks>\d+(\s*,\s*\d+)*)?\s*(--measure\s+(?P<name>[A-Za-z_]\w*)(?P<counts>(\s+--(flops|memory|profile))*))?\s*"
)


def load(shell) -> None:
    """Adds the magic to an IPython shell and starts the forkserver in the background."""
    limits.check_place()
    shell.register_magic_function(lambda line, cell: _ranks(shell, line, cell), "cell", "ranks")
    the_forkserver()


def _ranks(shell, line: str, cell: str) -> None:
    options = _LINE.fullmatch(line)
    if options is None:
        raise WorldError(f"%%ranks {line.strip()}: {_USAGE}")
    chosen = [int(rank) for rank in options["ranks"].split(",")] if options["ranks"] else None
    name = f"<cell {cells.current_number() or shell.execution_count}>"
    source = "\n" + cell  # the line with %%ranks counts, so that numbers agree with what the reader sees
    cells.remember(name, f"%%ranks{line}\n{cell}")
    compile(source, name, "exec")  # a slip of the pen is a SyntaxError here, not one from each rank
    if options["name"] is None:
        newest().run_cell(source, name, chosen)
    else:
        counts = wanted(**dict.fromkeys(options["counts"].replace("--", "").split(), True))
        shell.user_ns[options["name"]] = newest().measure_cell(source, name, chosen, counts)
