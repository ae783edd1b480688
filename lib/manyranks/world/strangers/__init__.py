"""Runs of code that nobody here has written: what was handed in, what a rank may call, and why a run did not end well."""
