"""Exercise 12."""

from tests.grading.answered import *  # noqa: F403
