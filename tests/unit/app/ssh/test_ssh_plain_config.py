"""A configuration of ssh, read without it: as ssh reads it, or not at all."""

from __future__ import annotations

import getpass
import os
import pwd
import shutil
import subprocess
import tempfile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.ssh.config import Destination, LocalUser, parse_settings, printed_settings, resolve_argv

PERSON = LocalUser(getpass.getuser(), pwd.getpwuid(os.getuid()).pw_dir)
LINES = [
    "Host gpu*",
    "Host gpu1 !gpu2",
    "Host * !gpu1",
    'Host "gpu1" other # gpu2',
    "Host [a-z]pu1",
    "HostName %h.lab",
    "HostName=10.0.0.1",
    "user root",
    "User nobody",
    "Port 2222",
    "IdentityFile ~/.ssh/one",
    'IdentityFile "/keys/%r@%n"',
    "IdentitiesOnly true",
    "identitiesonly no",
    "ProxyJump none",
    "ProxyJump bastion,root@second:22",
    "ProxyCommand nc -X 5 %h %p",
    "ProxyCommand none",
    "HostKeyAlias lab",
    "UserKnownHostsFile /a /b",
    "UserKnownHostsFile none",
    "StrictHostKeyChecking accept-new",
    "StrictHostKeyChecking off",
    "HashKnownHosts yes",
    "BatchMode yes",
    "Compression yes",
    "Compression no",
    "ConnectTimeout 7",
    "PasswordAuthentication no",
    "PubkeyAuthentication no",
    "PreferredAuthentications password,publickey",
    "NumberOfPasswordPrompts 1",
    "IdentityAgent none",
    "RevokedHostKeys /r",
    "ForwardX11 yes",
    "# words",
    "",
]
KEYS = "Host *\n  IdentityFile /k\n"
"""Which keys are tried without it differs between versions of ssh."""
DESTINATIONS = [Destination("gpu1"), Destination("gpu2"), Destination("gpu1", "grace", 2022), Destination("other")]


@pytest.mark.skipif(shutil.which("ssh") is None, reason="ssh is not installed")
@settings(max_examples=150)
@given(st.lists(st.sampled_from(LINES), max_size=8), st.sampled_from(DESTINATIONS))
def test_what_is_plain_is_read_as_ssh_reads_it(lines: list[str], destination: Destination) -> None:
    text = "\n".join(lines) + "\n" + KEYS
    with tempfile.NamedTemporaryFile("w", suffix=".conf") as file:
        file.write(text)
        file.flush()
        argv = resolve_argv(destination, file.name)
        by_ssh = subprocess.run(argv, capture_output=True, text=True, check=True).stdout
    ours = parse_settings(destination.text, printed_settings(destination, [text], PERSON), PERSON)

    assert ours == parse_settings(destination.text, by_ssh, PERSON)


def test_a_file_that_comes_first_counts_and_so_does_the_command_line() -> None:
    texts = ["Port 1\nIdentityFile /one\n", "Port 2\nUser x\nIdentityFile /two\n"]

    found = parse_settings("h", printed_settings(Destination("h", "grace"), texts, PERSON), PERSON)

    assert (found.port, found.user, found.identity_files) == (1, "grace", ("/one", "/two"))


def test_without_a_configuration_there_are_the_usual_files() -> None:
    found = parse_settings("h", printed_settings(Destination("h"), [], PERSON), PERSON)

    assert (found.hostname, found.port, found.user) == ("h", 22, PERSON.user)
    assert f"{PERSON.home}/.ssh/id_ed25519" in found.identity_files
    assert found.own_known_hosts_file == f"{PERSON.home}/.ssh/known_hosts"


@pytest.mark.parametrize(
    "line", ["Include other", "Match user x", "CanonicalizeHostname always", "KnownHostsCommand /bin/keys %H"]
)
@pytest.mark.parametrize("where", ["", "Host nobody-else\n"])
def test_what_only_ssh_can_follow_is_refused_wherever_it_stands(line: str, where: str) -> None:
    with pytest.raises(ValueError, match=line.split(maxsplit=1)[0].lower()):
        printed_settings(Destination("h"), [where + line], PERSON)


@pytest.mark.parametrize("line", ["CanonicalizeHostname no", "KnownHostsCommand none"])
def test_what_is_switched_off_is_in_nobodys_way(line: str) -> None:
    assert "hostname h\n" in printed_settings(Destination("h"), [line], PERSON)


@given(st.text())
def test_any_text_can_be_read_or_is_refused(text: str) -> None:
    try:
        printed = printed_settings(Destination("h"), [text], PERSON)
    except ValueError:
        return
    assert "hostname " in printed


@pytest.mark.parametrize(
    ("lines", "jump", "command"),
    [
        ("ProxyJump b\nProxyCommand nc", "b", ""),
        ("ProxyCommand nc\nProxyJump b", "", "nc"),
        ("ProxyJump none\nProxyCommand nc", "", "nc"),
    ],
)
def test_of_two_ways_through_something_the_first_counts(lines: str, jump: str, command: str) -> None:
    found = parse_settings("h", printed_settings(Destination("h"), [lines], PERSON), PERSON)

    assert (found.proxy_jump, found.proxy_command) == (jump, command)
