"""Exercise 05."""

from tests.grading.answered import *  # noqa: F403
