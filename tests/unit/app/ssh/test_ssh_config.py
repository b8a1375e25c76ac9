"""What `ssh -G` prints, and what a person may call a host."""

from __future__ import annotations

import os
import pwd
import shlex
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.errors import HostUnreachableError, UsageError
from app.ssh.config import (
    Destination,
    LocalUser,
    SshSettings,
    Strictness,
    parse_destination,
    parse_jumps,
    parse_settings,
    proxy_command_line,
    resolve_argv,
)
from app.ssh.way import agent_socket, dial

PERSON = LocalUser("ada", "/home/ada")
PRINTED = """\
host gpu1
user root
hostname 10.1.2.3
port 2222
identitiesonly yes
proxyjump bastion,root@second:2200
identityfile ~/.ssh/id_ed25519
identityfile %d/keys/%r@%n-%p
globalknownhostsfile /etc/ssh/ssh_known_hosts
userknownhostsfile ~/.ssh/known_hosts /srv/known_hosts
connecttimeout 7
"""


def settings(printed: str = PRINTED) -> SshSettings:
    return parse_settings("gpu1", printed, PERSON)


def test_everything_that_matters_is_read() -> None:
    assert settings() == SshSettings(
        alias="gpu1",
        hostname="10.1.2.3",
        port=2222,
        user="root",
        identity_files=("/home/ada/.ssh/id_ed25519", "/home/ada/keys/root@gpu1-2222"),
        identities_only=True,
        identity_agent="SSH_AUTH_SOCK",
        proxy_jump="bastion,root@second:2200",
        proxy_command="",
        hands_over_socket=False,
        host_key_alias="",
        known_hosts_files=("/home/ada/.ssh/known_hosts", "/srv/known_hosts", "/etc/ssh/ssh_known_hosts"),
        own_known_hosts_file="/home/ada/.ssh/known_hosts",
        hashes_known_hosts=False,
        strictness=Strictness.ASK,
        revoked_keys_files=(),
        connect_timeout_s=7.0,
        methods=("publickey", "keyboard-interactive", "password"),
        is_compressed=False,
        num_prompts=3,
    )


def test_none_is_nothing() -> None:
    printed = (
        "hostname h\nport 22\nuser u\nproxyjump none\nproxycommand none\nidentityagent none\nconnecttimeout none\n"
        "revokedhostkeys none\n"
    )

    found = settings(printed)

    assert (found.proxy_jump, found.proxy_command, found.identity_agent) == ("", "", "")
    assert (found.revoked_keys_files, found.connect_timeout_s) == ((), None)


@pytest.mark.parametrize(
    ("said", "path"),
    [("~/agent.%u", "/home/ada/agent.ada"), ("SSH_AUTH_SOCK", "/run/usual"), ("$OTHER", "/run/other"), ("none", "")],
)
def test_ssh_agent_is_where_the_configuration_says(said: str, path: str) -> None:
    environ = {"SSH_AUTH_SOCK": "/run/usual", "OTHER": "/run/other"}

    assert agent_socket(settings(f"{PRINTED}identityagent {said}\n"), environ) == path
    assert agent_socket(settings(), environ) == "/run/usual"
    assert agent_socket(settings(), {}) == ""


def test_files_of_revoked_keys_are_read() -> None:
    assert settings(PRINTED + "revokedhostkeys ~/revoked /etc/%h\n").revoked_keys_files == (
        "/home/ada/revoked",
        "/etc/10.1.2.3",
    )


@pytest.mark.parametrize(
    ("lines", "name"),
    [
        ("hostname GPU1\nport 22", "gpu1"),
        ("hostname gpu1\nport 23", "[gpu1]:23"),
        ("hostname gpu1\nport 23\nhostkeyalias Lab-1", "lab-1"),
    ],
)
def test_a_key_is_known_by_name_port_or_alias(lines: str, name: str) -> None:
    assert settings(lines + "\nuser u").key_name == name


@pytest.mark.parametrize("printed", ["", "hostname h\nport 22", "hostname h\nuser u\nport x"])
def test_output_that_says_too_little_is_an_error(printed: str) -> None:
    with pytest.raises(UsageError, match="ssh -G prints nothing of how to reach gpu1"):
        settings(printed)


@given(st.text())
def test_any_output_is_settings_or_an_error(printed: str) -> None:
    try:
        settings("hostname h\nport 22\nuser u\n" + printed)
    except UsageError:
        assert True


@pytest.mark.parametrize(
    ("text", "destination"),
    [
        ("gpu1", Destination("gpu1")),
        ("ada@gpu1.lab", Destination("gpu1.lab", "ada")),
        ("ada@10.0.0.1:2222", Destination("10.0.0.1", "ada", 2222)),
        ("[fe80::1%eth0]:22", Destination("fe80::1%eth0", "", 22)),
    ],
)
def test_a_destination_is_taken_apart_and_put_together(text: str, destination: Destination) -> None:
    assert parse_destination(text) == destination
    assert destination.text == text


@pytest.mark.parametrize(
    "text", ["", "-oProxyCommand=id", "u@-h", "h;id", "$(id)", "a b", "h:0", "h:70000", "h:x", "u@@h", "`id`"]
)
def test_what_is_no_host_is_never_given_to_ssh(text: str) -> None:
    with pytest.raises(UsageError, match="is not a host"):
        parse_destination(text)


@given(st.text(max_size=30))
def test_whatever_is_given_to_ssh_is_no_option(text: str) -> None:
    try:
        destination = parse_destination(text)
    except UsageError:
        return
    argv = resolve_argv(destination)
    assert argv[-2] == "--"
    assert not destination.host.startswith("-")
    assert not destination.user.startswith("-")


def test_ssh_is_asked_with_the_file_the_port_and_the_user() -> None:
    argv = resolve_argv(Destination("gpu1", "ada", 2222), "/c")

    assert argv == ["ssh", "-G", "-F", "/c", "-p", "2222", "-l", "ada", "--", "gpu1"]


def test_jumps_come_in_their_order() -> None:
    assert parse_jumps("bastion, ssh://root@second:2200/") == [
        Destination("bastion"),
        Destination("second", "root", 2200),
    ]
    assert parse_jumps("") == []


@pytest.mark.parametrize(
    ("said", "strictness"),
    [
        ("true", Strictness.REFUSE),
        ("yes", Strictness.REFUSE),
        ("accept-new", Strictness.ACCEPT_NEW),
        ("ask", Strictness.ASK),
        ("false", Strictness.ASK),
        ("off", Strictness.ASK),
    ],
)
def test_a_new_host_is_refused_accepted_or_asked_about(said: str, strictness: Strictness) -> None:
    assert settings(f"{PRINTED}stricthostkeychecking {said}\n").strictness is strictness


def test_new_hosts_are_written_to_the_first_file_of_the_person_and_to_no_other() -> None:
    assert settings().own_known_hosts_file == "/home/ada/.ssh/known_hosts"
    nowhere = settings(PRINTED.replace("~/.ssh/known_hosts /srv/known_hosts", "none") + "hashknownhosts yes\n")

    assert (nowhere.own_known_hosts_file, nowhere.hashes_known_hosts) == ("", True)
    assert nowhere.known_hosts_files == ("/etc/ssh/ssh_known_hosts",)


@pytest.mark.parametrize(
    ("lines", "methods"),
    [
        ("preferredauthentications password,gssapi-with-mic,publickey", ("password", "publickey")),
        ("pubkeyauthentication false\npasswordauthentication no", ("keyboard-interactive",)),
        ("pubkeyauthentication unbound\nkbdinteractiveauthentication no", ("publickey", "password")),
    ],
)
def test_ways_to_log_in_are_those_of_the_configuration(lines: str, methods: tuple[str, ...]) -> None:
    assert settings(f"{PRINTED}{lines}\n").methods == methods


@pytest.mark.parametrize(
    ("lines", "num_prompts"),
    [("", 3), ("numberofpasswordprompts 1", 1), ("numberofpasswordprompts 1000", 10), ("batchmode yes", 0)],
)
def test_a_person_is_asked_as_often_as_the_configuration_says(lines: str, num_prompts: int) -> None:
    assert settings(f"{PRINTED}{lines}\n").num_prompts == num_prompts


def test_a_proxy_command_is_told_where_to() -> None:
    command = settings(PRINTED + "proxycommand nc -X 5 %h %p # %n %r 100%%\n")

    assert proxy_command_line(command) == "exec nc -X 5 10.1.2.3 2222 # gpu1 root 100%"


@pytest.mark.parametrize(
    ("printed", "words"),
    [
        (PRINTED + "proxycommand nc %d\n", "ProxyCommand has %d"),
        (PRINTED.replace("10.1.2.3", "$(id)") + "proxycommand nc %h\n", "not given %h: .* no plain name"),
        (PRINTED.replace("user root", "user -oProxyCommand=id") + "proxycommand ssh %r\n", "not given %r"),
    ],
)
def test_a_proxy_command_is_told_nothing_that_a_shell_would_understand(printed: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        proxy_command_line(settings(printed))


@given(st.text())
def test_whatever_a_host_is_called_a_shell_gets_it_as_one_word_or_not_at_all(name: str) -> None:
    printed = PRINTED.replace("10.1.2.3", name.replace("\n", "").strip() or "h") + "proxycommand nc %h\n"
    try:
        line = proxy_command_line(settings(printed))
    except UsageError:
        return
    assert len(shlex.split(line)) == 3
    assert not shlex.split(line)[2].startswith("-")


def test_a_name_that_nobody_knows_leads_to_the_file_that_ssh_reads_where_home_is_moved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object) -> socket.socket:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "create_connection", fail)
    settings = parse_settings("h1", "hostname h1\nport 22\nuser me\n", LocalUser("me", "/home/me"))
    hints = {}
    for home in (pwd.getpwuid(os.getuid()).pw_dir, "/elsewhere"):
        monkeypatch.setenv("HOME", home)
        with pytest.raises(HostUnreachableError) as caught:
            dial(settings)
        hints[home] = caught.value.hint

    assert ["RANKDECK_SSH_CONFIG names another file" in hint for hint in hints.values()] == [False, True]
