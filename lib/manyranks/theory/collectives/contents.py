"""The chunks of a tensor that each rank holds after some rounds of a collective: whose terms are in them."""

from collections.abc import Iterable

from manyranks.theory.collectives import Message, Round

Contents = list[list[int]]  # [rank][chunk], where bit r is set if the term of rank r is in it; 0: nothing yet

ADDING = ("all_reduce", "reduce_scatter", "reduce")


def chunks(operation: str, algorithm: str, n: int) -> int:
    """Chunks that the algorithm cuts the tensor into, so that a chunk is one element of rounds(operation, chunks, …)."""
    if (operation, algorithm) == ("all_reduce", "halving_doubling"):
        return 2 ** (n.bit_length() - 1)  # cut anew for the largest power of two of ranks
    return n


def complete(operation: str, n: int) -> int:
    """Terms of a finished chunk: all ranks' where they are added, else the one of the rank that it comes from."""
    return n if operation in ADDING else 1


def at_first(operation: str, n: int, columns: int) -> Contents:
    """Returns what is held before the first round, with rank 0 as the root. In an all_to_all, column s comes from rank s."""
    if operation in ADDING:
        return [[1 << rank] * columns for rank in range(n)]
    if operation in ("broadcast", "scatter"):
        return [[1 if rank == 0 else 0] * columns for rank in range(n)]
    return [[1 << rank if chunk == rank else 0 for chunk in range(columns)] for rank in range(n)]


def after(operation: str, held: Contents, messages: Iterable[Round]) -> Contents:
    """The contents after these rounds; in each, all messages are sent before any arrives."""
    for together in messages:
        before, held = held, [list(row) for row in held]
        for message in together:
            for position in range(message.start, message.start + message.count):
                _arrive(operation, before, held, message, position % len(held[0]))
    return held


def _arrive(operation: str, before: Contents, held: Contents, message: Message, chunk: int) -> None:
    if operation == "all_to_all":
        held[message.destination][message.source] = before[message.source][message.source]
        return
    kept = held[message.destination][chunk] if message.adds else 0
    held[message.destination][chunk] = kept | before[message.source][chunk]
