"""Agents of hosts, started and ended: `up` and `down`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from app.commands.each_host import on_each, tell_each
from app.commands.host_options import exclude_option, json_option, reaches
from app.commands.inventory_file import named_hosts
from app.commands.relay_options import refuse_relay
from app.safe_text import LINE_LIMIT, clean

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from app.ssh.agent_link import AgentPlace


def lists_hosts(command: Callable[..., None]) -> Callable[..., None]:
    """Add what says which hosts are meant: they are what the command is about, not where its job is."""
    return click.argument("hosts", nargs=-1, metavar="[HOST]...")(exclude_option(command))


@click.command()
@lists_hosts
@json_option
@reaches
def up(*, hosts: tuple[str, ...], exclude: tuple[str, ...], is_json: bool, python: str, ssh_config: str) -> None:
    """Start the agent of each HOST, in the background, unless it serves already.

    A HOST is one that SSH reaches, localhost, or a pattern of the inventory, as 'gpu*'; without one it is all of the
    inventory.
    """
    if not hosts:
        refuse_relay("up")
    answers = on_each(named_hosts(hosts, exclude), python, ssh_config, lambda link: link.bring_up())
    raise SystemExit(tell_each(answers, _told_of_up, "up", is_json=is_json))


@click.command()
@lists_hosts
@click.option("--kill-jobs", is_flag=True, help="Kill its jobs first; without this they go on")
@json_option
@reaches
def down(
    *,
    hosts: tuple[str, ...],
    exclude: tuple[str, ...],
    kill_jobs: bool,
    is_json: bool,
    python: str,
    ssh_config: str,
) -> None:
    """End the agent of each HOST; its jobs go on without it, until the next agent takes them up.

    HOST is as for `up`.
    """
    if not hosts:
        refuse_relay("down")
    chosen = named_hosts(hosts, exclude)
    answers = on_each(chosen, python, ssh_config, lambda link: link.shut_down(kill_jobs=kill_jobs))
    raise SystemExit(tell_each(answers, _told_of_down, "down", is_json=is_json))


def _told_of_up(host: str, place: AgentPlace) -> tuple[str, Mapping[str, Any]]:
    epoch, directory = clean(place.epoch), clean(place.dir, LINE_LIMIT)
    how = "is up" if place.is_new else "was up already"
    fields = {"is_new": place.is_new, "pid": place.pid, "epoch": epoch, "dir": directory}
    return clean(f"the agent on {host} {how} (pid {place.pid}, {place.dir})"), fields


def _told_of_down(host: str, num_left: int) -> tuple[str, Mapping[str, Any]]:
    return f"the agent on {host} is down; {jobs_left(num_left)}", {"num_jobs_left": num_left}


def jobs_left(num_left: int) -> str:
    """Return what becomes of the jobs of an agent that ends."""
    return {0: "no job runs", 1: "one job goes on"}.get(num_left, f"{num_left} jobs go on")
