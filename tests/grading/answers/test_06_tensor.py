"""Exercise 06."""

from tests.grading.answered import *  # noqa: F403
