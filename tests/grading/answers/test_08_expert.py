"""Exercise 08."""

from tests.grading.answered import *  # noqa: F403
