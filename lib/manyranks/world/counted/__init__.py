"""Measured runs: what ranks sent, when they waited, and the program that they ran."""
