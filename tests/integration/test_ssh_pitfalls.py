"""Ways to hang, to be misled or to lose a host that SSH and its libraries have in store."""

from __future__ import annotations

import os
import resource
import sys
import threading
import time
from contextlib import ExitStack, closing, contextmanager
from typing import TYPE_CHECKING

import pytest

from app.errors import HostUnreachableError
from app.ssh.login import connect
from app.ssh.transport import execute
from tests.support.hosts import Network, require_hosts
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from app.ssh.connection import HostConnection


@pytest.fixture
def network(request: pytest.FixtureRequest) -> Iterator[Network]:
    require_hosts()
    with Network("h1", sshd_options=getattr(request, "param", ())) as network:
        yield network


@contextmanager
def connected(network: Network) -> Iterator[HostConnection]:
    with closing(connect("h1", str(network.ssh_config))) as connection:
        yield connection


def runs(connection: HostConnection) -> bool:
    try:
        return connection.run(["true"], 10).exit_code == 0
    except HostUnreachableError:
        return False


def test_a_program_that_reads_to_the_end_of_its_input_ends(network: Network) -> None:
    with connected(network) as connection:
        assert connection.run(["cat"], 20).exit_code == 0


def test_a_program_that_prints_more_than_anybody_wants_is_ended(network: Network) -> None:
    with connected(network) as connection, pytest.raises(HostUnreachableError, match="printed more than 1 MiB"):
        connection.run(["cat", "/dev/zero"], 60)


def test_a_host_that_stands_still_after_its_last_word_is_given_up_in_time(network: Network) -> None:
    """The output has ended, the exit status never comes: it is not waited for without a limit."""
    program = "import os, sys, time; os.close(1); os.close(2); time.sleep(1000)"

    with connected(network) as connection:
        began_s = time.monotonic()
        with pytest.raises(HostUnreachableError, match="does not answer in time"):
            connection.run([sys.executable, "-c", program], 0.5)

        assert time.monotonic() - began_s < 30


def test_nothing_that_is_asked_of_a_host_that_stands_still_takes_for_ever(network: Network) -> None:
    with connected(network) as connection:
        channel = connection._open_session()
        network["h1"].freeze_sessions()
        with pytest.raises(TimeoutError):
            execute(channel, ["true"], 0.2)
        with pytest.raises(HostUnreachableError):
            connection.run(["true"], 0.2)
        with pytest.raises(HostUnreachableError):
            connection.open_socket("/no/such.sock")
        with pytest.raises(HostUnreachableError):
            connection.open_process(["true"])


@pytest.mark.parametrize("network", [("RekeyLimit 64K",)], indirect=True)
def test_keys_are_exchanged_anew_while_much_is_printed(network: Network) -> None:
    with connected(network) as connection:
        for _ in range(3):
            assert len(connection.run(["head", "-c", "1000000", "/dev/zero"], 30).stdout) == 1_000_000


@pytest.mark.parametrize("network", [("MaxSessions 2",)], indirect=True)
def test_one_program_more_than_sshd_allows_is_an_error_and_leaves_the_others_alone(network: Network) -> None:
    with connected(network) as connection, ExitStack() as open_ones:
        for _ in range(2):
            open_ones.callback(connection.open_process(["cat"]).close)

        with pytest.raises(HostUnreachableError, match="opens no channel"):
            connection.run(["true"], 10)

        assert connection.is_alive
        open_ones.close()
        until(lambda: runs(connection), 10, "sshd has collected the others")


def test_descriptors_above_1023_are_as_good_as_others(network: Network) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(max(soft, 2048), hard), hard))
    with ExitStack() as taken:
        taken.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        descriptor = 0
        while descriptor < 1100:
            descriptor = os.open("/dev/null", os.O_RDONLY)
            taken.callback(os.close, descriptor)

        with connected(network) as connection:
            assert connection.run(["hostname"], 20).stdout == b"h1\n"


@pytest.mark.parametrize(
    "network",
    [
        ("Ciphers aes128-cbc,3des-cbc",),
        ("KexAlgorithms diffie-hellman-group14-sha1",),
        ("Ciphers aes128-ctr", "MACs hmac-md5,hmac-sha1"),
    ],
    indirect=True,
    ids=["CBC", "SHA-1", "MD5"],
)
def test_a_host_that_knows_only_old_algorithms_is_not_spoken_to_and_said_to(network: Network) -> None:
    with pytest.raises(HostUnreachableError, match="offers no algorithm that is still safe") as caught:
        connect("h1", str(network.ssh_config))

    assert "sshd" in caught.value.hint


def test_many_connections_at_once_do_not_disturb_each_other(network: Network) -> None:
    said: list[bytes] = []

    def go() -> None:
        with connected(network) as connection:
            said.append(connection.run(["hostname"], 30).stdout)

    threads = [threading.Thread(target=go) for _ in range(32)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)

    assert said == [b"h1\n"] * 32
