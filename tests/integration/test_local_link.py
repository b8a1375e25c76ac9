"""This machine as a host: the same agent and the same session, without SSH between."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from app.errors import AgentUnreachableError, HostUnreachableError
from app.sessions.remote_session import RemoteSession
from app.ssh import local_link
from app.ssh.local_link import LocalLink
from tests.support.waiting import until_async

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def state_home(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A short-named home of states, so that no agent of the person is met."""
    with tempfile.TemporaryDirectory(prefix="rdl-", dir="/tmp") as directory:
        monkeypatch.setenv("XDG_STATE_HOME", directory)
        yield Path(directory)


async def test_the_agent_of_this_machine_is_brought_up_watched_and_ended(state_home: Path) -> None:
    with LocalLink() as link:
        link.connect()
        with pytest.raises(AgentUnreachableError, match="none serves there"):
            link.find()
        assert link.bring_up().is_new
        assert not link.bring_up().is_new
        session = RemoteSession(link)
        try:
            await session.start()
            assert link.directory.is_relative_to(state_home)
            await until_async(lambda: session.view().nodes()[0].state == "up", 10, "reports come")
            assert [row.node for row in session.view().nodes()] == ["localhost"]
            assert session.title == "rankdeck on localhost"
        finally:
            await session.close()
            assert link.shut_down(kill_jobs=True) == 0


def test_a_python_without_rankdeck_and_none_at_all_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(AgentUnreachableError, match="/no/python does not run there"):
        LocalLink("/no/python").find()
    bare = tmp_path / "python"
    bare.write_text(f"#!/bin/sh\nexec {sys.executable} -S -P -c 'import sys; sys.exit(\"No module named agent\")'\n")
    bare.chmod(0o700)
    with pytest.raises(AgentUnreachableError, match="has no rankdeck"):
        LocalLink(str(bare)).find()


def test_a_python_that_hangs_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hanging = tmp_path / "python"
    hanging.write_text("#!/bin/sh\nexec sleep 600\n")
    hanging.chmod(0o700)
    monkeypatch.setattr(local_link, "VERB_TIMEOUT_S", 0.2)
    with pytest.raises(HostUnreachableError, match="does not end"):
        LocalLink(str(hanging)).find()
