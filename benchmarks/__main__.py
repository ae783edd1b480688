"""Runs the benchmarks and prints one table: `python -m benchmarks [group …]`."""

import sys

GROUPS = (
    "world",
    "busy",
    "notebook",
    "replay",
    "theory",
    "explorer",
    "collectives",
    "data_parallel",
    "zero",
    "checkpointing",
    "pipeline",
    "tensor",
    "context",
    "expert",
    "mfu",
    "kernels",
    "failures",
    "nd",
    "classroom",
)


def main(wanted: list[str]) -> None:
    from benchmarks import apart
    from benchmarks.compare import Row, table

    if unknown := sorted(set(wanted) - set(GROUPS)):
        raise SystemExit(f"no group {', '.join(unknown)}; there are: {', '.join(GROUPS)}")
    rows: list[Row] = []
    failed: list[str] = []
    try:
        for group in wanted or GROUPS:
            try:
                for row in apart.rows(group):
                    rows.append(row)
                    _progress(row.what)
            except ChildProcessError as error:
                failed.append(str(error))
    finally:
        _progress("")
        print(table(rows))
    if failed:
        raise SystemExit(f"{'; '.join(failed)}: the lines above say why")


def _progress(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)
    elif text:  # a log shows that it goes on
        print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
