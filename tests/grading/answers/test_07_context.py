"""Exercise 07."""

from tests.grading.answered import *  # noqa: F403
