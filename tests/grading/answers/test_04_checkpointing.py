"""Exercise 04."""

from tests.grading.answered import *  # noqa: F403
