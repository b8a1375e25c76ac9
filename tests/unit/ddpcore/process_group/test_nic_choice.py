"""Which interface gloo and NCCL are told to use."""

from __future__ import annotations

import pytest

from ddpcore.errors import InterfaceError
from ddpcore.process_group.choices import Route, check_interfaces, choose_nic

ETHERNET = Route("eth0", "10.0.0.2", is_loopback=False)
LOOPBACK = Route("lo", "127.0.0.1", is_loopback=True)
BOTH = ("gloo", "nccl")


def test_both_take_the_way_to_the_others() -> None:
    choice = choose_nic(ETHERNET, BOTH, {}, 2)

    assert choice.environment == {"GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "=eth0"}
    assert choice.line == "gloo and nccl over eth0 (10.0.0.2), the way to the other ranks"
    assert choice.hint == ""


def test_what_the_user_has_set_stays() -> None:
    choice = choose_nic(ETHERNET, BOTH, {"NCCL_SOCKET_IFNAME": "^docker"}, 2)

    assert choice.environment == {"GLOO_SOCKET_IFNAME": "eth0"}
    assert choice.line == (
        "NCCL_SOCKET_IFNAME=^docker by the environment; gloo over eth0 (10.0.0.2), the way to the other ranks"
    )


def test_only_what_is_in_use_is_set() -> None:
    assert choose_nic(LOOPBACK, ("gloo",), {}, 1).environment == {"GLOO_SOCKET_IFNAME": "lo"}
    assert choose_nic(None, BOTH, {}, 1) == ({}, "", "")
    assert choose_nic(ETHERNET, ("mpi",), {}, 2) == ({}, "", "")


@pytest.mark.parametrize(
    ("route", "environ"),
    [(LOOPBACK, {}), (ETHERNET, {"GLOO_SOCKET_IFNAME": "lo"}), (None, {"NCCL_SOCKET_IFNAME": "=lo"})],
)
def test_loopback_between_machines_is_warned_of(route: Route | None, environ: dict[str, str]) -> None:
    assert "lo reaches only this machine, and the job's ranks are on 2" in choose_nic(route, BOTH, environ, 2).hint
    assert choose_nic(route, BOTH, environ, 1).hint == ""


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"GLOO_SOCKET_IFNAME": "eth0, lo"},
        {"NCCL_SOCKET_IFNAME": "=eth0:1,lo"},
        {"NCCL_SOCKET_IFNAME": "en,eth"},
        {"NCCL_SOCKET_IFNAME": "^docker"},
    ],
)
def test_names_that_exist_and_beginnings_of_names_pass(environ: dict[str, str]) -> None:
    check_interfaces(environ, BOTH, {"lo", "eth0"})


@pytest.mark.parametrize("environ", [{"GLOO_SOCKET_IFNAME": "eth0,nope"}, {"NCCL_SOCKET_IFNAME": "=nope"}])
def test_a_name_that_does_not_exist_is_refused_with_those_that_do(environ: dict[str, str]) -> None:
    with pytest.raises(InterfaceError, match=r"this machine has no interface 'nope', it has eth0, lo;"):
        check_interfaces(environ, BOTH, {"lo", "eth0"})
    check_interfaces(environ, (), {"lo"})
