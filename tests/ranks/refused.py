"""What ranks say of a table of refusals: name -> what to call on every rank, and a pattern of the error."""

from collections.abc import Callable, Mapping

Refused = Mapping[str, tuple[Callable[[], object], str]]


def said(refused: Refused) -> dict[str, str]:
    """On a rank: the error of each call."""
    found = {}
    for name, (make, _) in refused.items():
        try:
            make()
            found[name] = "nothing was raised"
        except ValueError as error:
            found[name] = str(error)
    return found
