"""Exercise 03."""

from tests.grading.answered import *  # noqa: F403
