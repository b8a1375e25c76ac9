"""Who leaves the console while the doctor examines hosts reads that nothing was started, and nothing else."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

import pytest

from tests.support.hosts import Network, require_hosts
from tests.support.typist import Typist

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def network() -> Iterator[Network]:
    require_hosts()
    with Network("h1", "h2") as network:
        (network.directory / "run").mkdir(mode=0o700)
        yield network


@pytest.mark.slow
@pytest.mark.parametrize("key", ["q", "ctrl+c"])
def test_only_that_nothing_was_started_is_printed(key: str, network: Network) -> None:
    environment = {
        **os.environ,
        "TERM": "xterm-256color",
        "COLUMNS": "120",
        "LINES": "35",
        "RANKDECK_PYTHON": sys.executable,
        "RANKDECK_SSH_CONFIG": str(network.ssh_config),
        "XDG_RUNTIME_DIR": str(network.directory / "run"),
    }
    arguments = ("run", "--host", "h1", "--host", "h2", "-m", "this")
    with Typist([sys.executable, "-P", "-m", "app", *arguments], environment) as local_user:
        local_user.until_it_says("rankdeck doctor looks at")
        local_user.types("q") if key == "q" else local_user.presses_ctrl_c()
        assert local_user.exit_code() == 130
        after = local_user.said.rpartition("\x1b[?1049l")[2]
        assert "rankdeck: nothing was started" in after
        assert "the connection broke" not in after
