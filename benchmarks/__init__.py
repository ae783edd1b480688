"""Speed, side by side with what a reader would use instead: `python -m benchmarks`, or `python -m benchmarks world`."""
