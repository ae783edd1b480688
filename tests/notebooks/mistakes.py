"""The common mistake in each task of each lesson, and what the check must say about it.

A lesson's name -> the name that the stub defines -> the source of a wrong version, and words of the check's output.
"""

MISTAKES: dict[str, dict[str, tuple[str, str]]] = {}
