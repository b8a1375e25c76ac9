"""The file by which agents find a relay."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import msgspec
import pytest

from agent.errors import OperatorError, StateDirError
from agent.relay.relay_dir import Invitation, expected_nodes, listening_place, read_invitation, write_invitation
from agent.transport.relay_sockets import new_key

if TYPE_CHECKING:
    from pathlib import Path


def invitation(relay: str = "r") -> Invitation:
    node, own = new_key(), new_key()
    return Invitation("10.0.0.1", 4242, own.public, node.public, node.secret.decode(), relay)


def test_what_is_written_is_read_and_a_newer_one_takes_its_place(tmp_path: Path) -> None:
    path = tmp_path / "invitation.json"
    assert read_invitation(path) is None
    older, newer = invitation("one"), invitation("two")

    write_invitation(path, older)
    assert read_invitation(path) == older
    write_invitation(path, newer)

    assert read_invitation(path) == newer
    assert path.stat().st_mode & 0o777 == 0o600
    assert [found.name for found in tmp_path.iterdir()] == ["invitation.json"]


def test_one_that_others_can_read_is_refused_with_its_mode(tmp_path: Path) -> None:
    path = tmp_path / "invitation.json"
    write_invitation(path, invitation())
    path.chmod(0o640)

    with pytest.raises(StateDirError, match="mode 0640"):
        read_invitation(path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_one_of_another_user_is_refused_with_his_number(tmp_path: Path) -> None:
    path = tmp_path / "invitation.json"
    write_invitation(path, invitation())
    os.chown(path, 12345, 12345)

    with pytest.raises(StateDirError, match="belongs to user 12345"):
        read_invitation(path)


def test_a_planted_link_a_pipe_and_what_is_no_invitation_are_refused(tmp_path: Path) -> None:
    write_invitation(tmp_path / "real", invitation())
    (tmp_path / "link").symlink_to(tmp_path / "real")
    os.mkfifo(tmp_path / "pipe", 0o600)
    (tmp_path / "other").touch(0o600)
    newer = msgspec.structs.replace(invitation(), version=99)
    write_invitation(tmp_path / "newer", newer)

    for name, words in [("link", "read"), ("pipe", "read"), ("other", "no invitation"), ("newer", "version 99")]:
        with pytest.raises(StateDirError, match=words):
            read_invitation(tmp_path / name)


def test_nothing_that_prints_an_invitation_prints_its_secret() -> None:
    one = invitation()

    assert one.node_secret not in f"{one!r} {one.key!r}"


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("127.0.0.1", ("127.0.0.1", 0)),
        ("127.0.0.1:4242", ("127.0.0.1", 4242)),
        ("lo:17", ("127.0.0.1", 17)),
        ("::1", ("::1", 0)),
        ("[::1]:9", ("::1", 9)),
    ],
)
def test_a_relay_listens_at_an_address_or_an_interface(text: str, place: tuple[str, int]) -> None:
    assert listening_place(text) == place


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("0.0.0.0", "every network"),
        ("::", "every network"),
        ("203.0.113.7", "no such address"),
        ("nowhere0", "no such interface"),
        ("lo:99999", "INTERFACE_OR_ADDRESS"),
        ("lo:x", "INTERFACE_OR_ADDRESS"),
        ("", "no such interface"),
    ],
)
def test_all_addresses_and_those_that_are_not_here_are_refused(text: str, words: str) -> None:
    with pytest.raises(OperatorError, match=words):
        listening_place(text)


def test_an_allocation_says_how_many_nodes_it_has() -> None:
    assert expected_nodes({"SLURM_JOB_NUM_NODES": "128"}) == 128
    assert expected_nodes({}) == expected_nodes({"SLURM_JOB_NUM_NODES": "²"}) == 0
