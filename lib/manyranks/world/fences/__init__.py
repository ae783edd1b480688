"""Fences around ranks that run code of strangers."""
