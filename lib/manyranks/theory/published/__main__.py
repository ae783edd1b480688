"""Prints every published table next to what the theory says: `python -m manyranks.theory.published`."""

from manyranks.theory import kernels
from manyranks.theory.kernels import Constants
from manyranks.theory.published import conversions, error_bars, fit, layers, one_gpu, peaks, steps
from manyranks.theory.stacks import STACKS


def main() -> None:
    print("Computed from a formula and the table's own numbers\n")
    _print(("table", "what", "computed", "published", "error"), [_conversion(check) for check in conversions.checks()])
    print("\nPredicted from the configuration alone, with the same constants for every row\n")
    predictions = [_prediction(row) for row in (*steps.rows(), *steps.megascale())]
    _print(("table", "run", "predicted", "published", "unit", "error"), predictions)
    print(f"\nMean absolute error of what the constant was fitted on: {_error(fit.FITTED_ON)}; of the others:")
    for table in steps.TABLES:
        if table not in fit.FITTED_ON:
            print(f"  {table}: {_error((table,))}")
    header = ("table", "run", "forward ms", "published", "backward ms", "published", "overhead", "published")
    print("\nOne layer, with the same constants\n")
    _print(header, [_layer(row) for row in layers.rows()])
    for chip in one_gpu.CHIPS:
        print(f"\nOne {chip}, measured for this course: ms in which kernels run, forward and backward, and GB used at once\n")
        timed = [one_gpu.attentions(chip, "flash-2"), one_gpu.attentions(chip, "cudnn"), one_gpu.steps(chip)]
        lines, used = [_of_one_gpu(row, 1e3) for table in timed for row in table], one_gpu.peaks(chip)
        _print(("what", "run", "predicted", "measured", "error"), [*lines, *(_of_one_gpu(row, 1e-9) for row in used)])
        means = (f"{table[0].table} {one_gpu.mean_error(table):.1%} ({len(table)})" for table in (*timed, used))
        print(f"\nMean absolute error: {', '.join(means)}")
    print("\nPeaks: GB that the allocator held at most, and the error bar that each has without its own run\n")
    _print(("peak", "run", "predicted", "measured", "error", "error bar"), [_peak(row) for row in peaks.rows()])
    print()
    _print(("constant", "value", "where from"), _constants())
    print("\nEach table with the constant fitted on the other tables\n")
    without = fit.leave_one_out().items()
    header = ("table", "matmul", "error where it is not fitted on", "error")
    found = [(table, f"{matmul:.2f}", f"{error:.1%}", _error((table,)).split(" (")[0]) for table, (matmul, error) in without]
    _print(header, found)


def _conversion(check: conversions.Check) -> tuple[str, ...]:
    computed, published = (f"{value:,.10g}" if value > 1e9 else f"{value:.5g}" for value in (check.computed, check.published))
    return check.table, check.what, computed, published, f"{check.error:+.2%}" + ("" if check.holds else "  TOO FAR")


def _prediction(row: steps.PublishedRun) -> tuple[str, ...]:
    return row.table, row.name, f"{row.predict():.4g}", f"{row.measured:.4g}", row.unit, f"{row.error():+.1%}"


def _of_one_gpu(row: one_gpu.Measurement, by: float) -> tuple[str, ...]:
    return row.table, row.name, f"{by * row.predicted:.3g}", f"{by * row.measured:.3g}", f"{row.error:+.1%}"


def _peak(row: peaks.MeasuredPeak) -> tuple[str, ...]:
    bar = str(error_bars.of_measured(row))
    return f"peak, {row.table}", row.name, f"{row.predict() / 1e9:.3g}", f"{row.measured / 1e9:.3g}", f"{row.error():+.1%}", bar


def _layer(row: layers.Experiment) -> tuple[str, ...]:
    found, printed = row.predict(), row.measured
    times = [f"{1e3 * seconds:.1f}" for pair in zip(found[:2], printed[:2], strict=True) for seconds in pair]
    overheads = [f"{share:+.1%}" if share is not None else "" for share in (found.overhead, printed.overhead)]
    return layers.TABLE, row.name, *times, *overheads


def _constants() -> list[tuple[str, ...]]:
    defaults, fitted = Constants(), " and ".join(fit.FITTED_ON)
    pytorch, megatron = (f"{STACKS[name].host:g} s" for name in ("pytorch", "megatron-core"))
    return [
        ("matmul", f"{defaults.matmul:g}", f"fitted once on {fitted}; today's fit gives {fit.fit():.2f}"),
        ("bandwidth", f"{defaults.bandwidth:g}", "mean of the rings in measured_busbw.csv ÷ specification"),
        ("overhead", f"{defaults.overhead:g} s", kernels.OVERHEAD_SOURCE),
        ("host", pytorch, "a launch, with PyTorch: a round number"),
        ("host", megatron, "a launch, with Megatron: fitted; the same whichever table is left out"),
    ]


def _error(tables: tuple[str, ...]) -> str:
    chosen = [row for row in steps.rows() if row.table in tables]
    return f"{fit.mean_error(chosen):.1%} ({len(chosen)} runs)"


def _print(header: tuple[str, ...], lines: list[tuple[str, ...]]) -> None:
    widths = [max(len(line[i]) for line in (header, *lines)) for i in range(len(header))]
    for line in (header, tuple("─" * width for width in widths), *lines):
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


if __name__ == "__main__":
    main()
