"""Hosts to reach by SSH, and a person at a desk who reaches them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.desk import Desk
from tests.support.hosts import Network, require_hosts

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def network(request: pytest.FixtureRequest) -> Iterator[Network]:
    """Give hosts by the names in `HOSTS` of the test's file."""
    require_hosts()
    with Network(*request.module.HOSTS) as network:
        yield network


@pytest.fixture
def desk(network: Network) -> Iterator[Desk]:
    desk = Desk(network)
    yield desk
    desk.end()
