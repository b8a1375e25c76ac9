"""One thing done on many hosts at once: what each answers is told in the order of the hosts, as soon as it is known."""

from __future__ import annotations

import queue
import threading
from concurrent.futures import Future
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

import click

from app.commands.host_options import link_by, named_python, print_json
from app.errors import AppError, ExitCode
from app.headless import print_line

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from app.inventory.inventory import HostEntry
    from app.ssh.agent_link import AgentLink

MAX_AT_ONCE = 32
"""Each takes a thread, and a process of ssh for a moment."""

Answer = TypeVar("Answer")


def takes_hosts(command: Callable[..., None]) -> Callable[..., None]:
    """Add what says which hosts are meant."""
    command = click.option(
        "--exclude", multiple=True, metavar="PATTERN", help="Leave hosts of the inventory out, as 'gpu1*'"
    )(command)
    return click.argument("hosts", nargs=-1, metavar="[HOST]...")(command)


def on_each(
    hosts: Sequence[HostEntry], python: str, ssh_config: str, do: Callable[[AgentLink], Answer]
) -> Iterator[tuple[str, Answer | AppError]]:
    """Yield each host and what `do` returned or raised there; one that fails stops no other.

    Args:
        hosts: Where; at most `MAX_AT_ONCE` at a time.
        python: Of hosts for which the inventory says nothing else.
        ssh_config: Read instead of ~/.ssh/config.
        do: Called in a thread, with a link that is connected.
    """
    todo: queue.SimpleQueue[tuple[HostEntry, Future[Answer]]] = queue.SimpleQueue()
    named = named_python(python)
    answers: list[tuple[str, Future[Answer]]] = []
    for entry in hosts:
        answer: Future[Answer] = Future()
        answers.append((entry.host, answer))
        todo.put((entry, answer))

    def work() -> None:
        with suppress(queue.Empty):
            while True:
                entry, answer = todo.get_nowait()
                try:
                    with link_by(entry.host, named, entry.python, python, ssh_config) as link:
                        link.connect()
                        found = do(link)
                    answer.set_result(found)  # once the link is gone: the command may end with the last answer
                except AppError as error:
                    answer.set_exception(error)
                finally:
                    answer.cancel()  # of what went wrong in no way of ours, which the thread tells: nobody waits for it

    # Not a pool: one would keep a person who has pressed Ctrl-C until the slowest host has answered.
    for _ in range(min(MAX_AT_ONCE, len(hosts))):
        threading.Thread(target=work, name="rankdeck-host", daemon=True).start()
    for host, answer in answers:
        try:
            yield host, answer.result()
        except AppError as error:
            yield host, error


def tell_each(
    answers: Iterator[tuple[str, Answer | AppError]],
    told: Callable[[str, Answer], tuple[str, Mapping[str, Any]]],
    *,
    is_json: bool,
) -> ExitCode:
    """Print a line a host, or one JSON object of all; return the exit code of the first that failed.

    Args:
        answers: As `on_each` yields them.
        told: Makes a sentence and JSON fields of a host's answer.
        is_json: Print the object.
    """
    code = ExitCode.WELL
    rows: list[dict[str, Any]] = []
    for host, answer in answers:
        if isinstance(answer, AppError):
            code = code or ExitCode(answer.exit_code)
            rows.append({"host": host, "error": str(answer), "hint": answer.hint})
            print_line(f"rankdeck: {answer.whole}")
            continue
        sentence, fields = told(host, answer)
        rows.append({"host": host, "error": None, "hint": "", **fields})
        if not is_json:
            click.echo(sentence)
    if is_json:
        print_json({"hosts": rows})
    return code
