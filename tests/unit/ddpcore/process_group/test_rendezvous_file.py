"""A rendezvous file is looked at before torch opens it: torch would take any file for its own."""

from __future__ import annotations

import contextlib
import fcntl
import os
from typing import TYPE_CHECKING

import pytest
from torch._C._distributed_c10d import FileStore

from ddpcore.errors import ContradictoryLaunchError, StaleRendezvousError
from ddpcore.process_group import rendezvous
from ddpcore.process_group.rendezvous import check_rendezvous_file

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def meet(tmp_path: Path) -> Path:
    return tmp_path / "meet"


def written_by_torch(path: Path) -> bytes:
    store = FileStore(str(path), -1)
    store.set("key", "value")
    store.add("number", 3)
    store.delete_key("key")
    del store
    return path.read_bytes()


def test_a_file_that_is_not_there_yet_is_well(meet: Path) -> None:
    check_rendezvous_file(str(meet))

    assert not meet.exists()


def test_torch_s_own_file_is_well_and_so_is_an_empty_one(meet: Path) -> None:
    meet.touch()
    check_rendezvous_file(str(meet))
    written_by_torch(meet)
    check_rendezvous_file(str(meet))


def test_a_file_that_was_left_half_written_is_recognised_wherever_it_ends(meet: Path) -> None:
    content = written_by_torch(meet)
    whole = 0
    for length in range(1, len(content)):
        meet.write_bytes(content[:length])
        with contextlib.suppress(StaleRendezvousError):
            check_rendezvous_file(str(meet))
            whole += 1
    assert whole == content.count(b"/") - 1
    meet.write_bytes(content[:-1])
    with pytest.raises(StaleRendezvousError, match=rf"left half-written by a process .* remove it \(rm {meet}\)"):
        check_rendezvous_file(str(meet))


@pytest.mark.parametrize(
    "content", [b"print('hello')\n", b"\x00" * 64, b"\x7fELF\x02\x01\x01" + b"\x00" * 99, b"{}" * 40]
)
def test_a_file_that_is_something_else_is_refused_and_left_alone(content: bytes, meet: Path) -> None:
    meet.write_bytes(content)

    with pytest.raises(ContradictoryLaunchError, match="exists and is no rendezvous file"):
        check_rendezvous_file(str(meet))
    assert meet.read_bytes() == content


def test_a_file_that_somebody_holds_for_ever_is_read_all_the_same(meet: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "LOCK_PATIENCE_S", 0.05)
    content = written_by_torch(meet)
    with meet.open("ab") as writer:
        fcntl.flock(writer, fcntl.LOCK_EX)
        check_rendezvous_file(str(meet))
    assert meet.read_bytes() == content


def test_a_directory_that_is_not_there_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(ContradictoryLaunchError, match=f"there is no directory {tmp_path}/nowhere here"):
        check_rendezvous_file(f"{tmp_path}/nowhere/meet")


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ContradictoryLaunchError, match="is no file"):
        check_rendezvous_file(str(tmp_path))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_what_cannot_be_written_is_refused(meet: Path) -> None:
    meet.touch()
    meet.chmod(0o400)
    with pytest.raises(ContradictoryLaunchError, match="is not writable"):
        check_rendezvous_file(str(meet))
    meet.unlink()
    meet.parent.chmod(0o500)
    with pytest.raises(ContradictoryLaunchError, match="is not writable"):
        check_rendezvous_file(str(meet))
    meet.parent.chmod(0o700)
