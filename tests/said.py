"""The words of every explorer when it opens, and at each of its buttons: said.json, for unit and browser tests.

`python -m tests.said` writes it anew. Look at the difference: each change is one that a reader sees.
"""

import json
from pathlib import Path

from manyranks import show

TABLE = Path(__file__).with_suffix(".json")
NAMES = ("hardware", "collectives", "data_parallel", "zero", "checkpointing", "pipeline", "tensor", "context", "expert", "mfu")
NAMES += ("nd", "kernels", "failures")
SAID: dict[str, dict[str, str]] = json.loads(TABLE.read_text()) if TABLE.exists() else {}


def says(name: str) -> dict[str, str]:
    """Returns what an explorer says now: "" for how it opens, then each button."""
    explorer = getattr(show, name).explorer()
    return {"": explorer.status} | {button: explorer.preset(button).status for button in explorer.presets}


if __name__ == "__main__":
    TABLE.write_text(json.dumps({name: says(name) for name in NAMES}, indent=1, ensure_ascii=False) + "\n")
