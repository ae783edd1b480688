"""The ranks' answers to a table of refusals: name -> what to call on every rank, and a pattern of the error."""

import re
from collections.abc import Callable, Iterable, Mapping

Refused = Mapping[str, tuple[Callable[[], object], str]]


def said(refused: Refused) -> dict[str, str]:
    """On a rank: the error of each call; its type, too, where it is no ValueError."""
    found = {}
    for name, (make, _) in refused.items():
        try:
            make()
            found[name] = "nothing was raised"
        except (IndexError, RuntimeError, ValueError) as error:
            found[name] = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
    return found


def unlike(refused: Refused, ranks: Iterable[dict[str, str]]) -> dict[str, str]:
    """The ranks' words that do not fit the table."""
    return {name: found[name] for found in ranks for name, (_, how) in refused.items() if not re.search(how, found[name])}
