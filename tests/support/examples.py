"""A property with a few examples in every run, and with many where the slow tests run.

@few_and_many(10, 40, rank=st.integers(0, 3))
def test_it_holds(rank: int) -> None: ...
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, given, settings

if TYPE_CHECKING:
    from collections.abc import Callable

    from hypothesis.strategies import SearchStrategy

UNCHECKED = (HealthCheck.too_slow, HealthCheck.data_too_large)
"""How fast examples are drawn, and how many are too large, depends on other tests: on the machine's load, and on the
constants that Hypothesis finds in whatever modules this worker has imported."""


def few_and_many(
    few: int, many: int, *strategies: SearchStrategy[Any], **named: SearchStrategy[Any]
) -> Callable[[Callable[..., None]], Callable[[int], None]]:
    """Decorate a property as `given` does; `many` examples are slow."""

    def decorate(check: Callable[..., None]) -> Callable[[int], None]:
        def run(num_examples: int) -> None:
            a_number = settings(max_examples=num_examples, suppress_health_check=UNCHECKED)
            a_number(given(*strategies, **named)(check))()

        functools.update_wrapper(run, check)
        del run.__wrapped__  # type: ignore[attr-defined] # pytest would look for its arguments
        numbers = [few, pytest.param(many, marks=pytest.mark.slow)]
        decorated: Callable[[int], None] = pytest.mark.parametrize("num_examples", numbers)(run)
        return decorated

    return decorate
