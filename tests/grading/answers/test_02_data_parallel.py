"""Exercise 02."""

from tests.grading.answered import *  # noqa: F403
