"""Runs that go wrong: proven deadlocks, and the report that a reader sees."""
