"""One thing done on many hosts at once: what each answers is told in the order of the hosts, as soon as it is known."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import click

from app.at_once import at_once
from app.audit_lines import Act
from app.commands.audited import audit_log, tell_trouble
from app.commands.host_options import link_by, named_python, print_json
from app.errors import AppError, ExitCode
from app.headless import print_line

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from app.inventory.inventory import HostEntry
    from app.ssh.agent_link import AgentLink

Answer = TypeVar("Answer")


def on_each(
    hosts: Sequence[HostEntry], python: str, ssh_config: str, do: Callable[[AgentLink], Answer]
) -> Iterator[tuple[str, Answer | AppError]]:
    """Yield each host and what `do` returned or raised there; one that fails stops no other.

    Args:
        hosts: Where; some at a time.
        python: Of hosts for which the inventory says nothing else.
        ssh_config: Read instead of ~/.ssh/config.
        do: Called in a thread, with a link that is connected.
    """
    named = named_python(python)

    def visit(entry: HostEntry) -> Answer:
        with link_by(entry.host, named, entry.python, python, ssh_config) as link:
            link.connect()
            return do(link)  # told once the link is gone: the command may end with the last answer

    yield from zip((entry.host for entry in hosts), at_once(hosts, visit), strict=True)


def tell_each(
    answers: Iterator[tuple[str, Answer | AppError]],
    told: Callable[[str, Answer], tuple[str, Mapping[str, Any]]],
    action: str,
    *,
    is_json: bool,
) -> ExitCode:
    """Print a line a host, or one JSON object of all, and write it down; return the exit code of the first that failed.

    Args:
        answers: As `on_each` yields them.
        told: Makes a sentence and JSON fields of a host's answer.
        action: What was done, for the log of such things.
        is_json: Print the object.
    """
    code = ExitCode.WELL
    rows: list[dict[str, Any]] = []
    audit = audit_log()
    for host, answer in answers:
        if isinstance(answer, AppError):
            code = code or ExitCode(answer.exit_code)
            rows.append({"host": host, "error": str(answer), "hint": answer.hint})
            print_line(f"rankdeck: {answer.whole}")
            audit.add(Act(action, (host,)), answer.whole, is_done=False)
            continue
        sentence, fields = told(host, answer)
        audit.add(Act(action, (host,)), sentence)
        rows.append({"host": host, "error": None, "hint": "", **fields})
        if not is_json:
            click.echo(sentence)
    if is_json:
        print_json({"hosts": rows})
    tell_trouble(audit)
    return code
