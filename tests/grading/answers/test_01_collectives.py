"""Exercise 01."""

from tests.grading.answered import *  # noqa: F403
