"""Exercise 10."""

from tests.grading.answered import *  # noqa: F403
