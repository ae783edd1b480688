"""Exercise 00."""

from tests.grading.answered import *  # noqa: F403
