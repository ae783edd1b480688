"""CPU-seconds of each group of tests, with the ranks and kernels that they start; printed at the end of a run.

`make test` may take 900 of them on a machine that runs an empty loop of ten million turns in 0.25 s.
A plugin: pytest loads it whatever is tested (conftest.py in the root folder names it).
"""

from collections import defaultdict
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).resolve().parents[1]
GROUPS = ("lessons", "labs", "grading", "ranks", "unit", "notebooks", "browser", "cluster")
_spent: dict[str, float] = defaultdict(float)  # of each file, in this process and its descendants


def group_of(file: str) -> str:
    """ "grading" of tests/grading/…; notebooks count as lessons, those in a folder lab/ as labs."""
    path = Path(file)
    if path.suffix == ".ipynb":
        return "labs" if path.parent.name == "lab" else "lessons"
    return path.parts[1] if path.parts[1:] and path.parts[1] in GROUPS else "unit"


def used() -> float:
    """CPU-seconds of this process and all that it has started, as far as they or their parents still are there."""
    total = 0.0
    own = psutil.Process()
    for process in [own, *own.children(recursive=True)]:
        try:
            total += sum(process.cpu_times()[:4])
        except psutil.NoSuchProcess:
            continue
    return total


class Meter:
    """Adds what a process uses while a file's tests run to that file."""

    def __init__(self):
        self._file, self._before = "", used()

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        if (file := nodeid.partition("::")[0]) != self._file:
            self._add()
            self._file = file

    def pytest_sessionfinish(self, session) -> None:
        self._add()
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput["cpu"] = dict(_spent)

    def _add(self) -> None:
        now = used()
        _spent[self._file] += max(0.0, now - self._before)
        self._before = now


class Collector:
    """In the process that waits for the workers: adds up what they say."""

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node, error) -> None:
        for file, seconds in getattr(node, "workeroutput", {}).get("cpu", {}).items():
            _spent[file] += seconds

    def pytest_terminal_summary(self, terminalreporter) -> None:
        groups: dict[str, float] = defaultdict(float)
        for file, seconds in _spent.items():
            if file:
                groups[group_of(file)] += seconds
        parts = [f"{name} {groups[name]:.0f}" for name in GROUPS if name in groups]
        terminalreporter.write_line(f"CPU-seconds: {', '.join(parts)}; together {sum(_spent.values()):.0f}")
        if terminalreporter.config.getoption("--durations"):
            for file, seconds in sorted(_spent.items(), key=lambda one: -one[1])[:60]:
                terminalreporter.write_line(f"{seconds:8.1f} s  {file or 'before the first test'}")


def pytest_configure(config) -> None:
    config.pluginmanager.register(Collector())
    if not config.getoption("numprocesses", None):
        config.pluginmanager.register(Meter())
