"""The verb `demo`: a job of this machine, over two private agents."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import click

from app.commands.host_options import read_only_option, record_option
from app.commands.settings_options import takes_settings
from app.evidence.store import check_directory
from app.faults import AT_START, parse_fault
from app.presenting import is_terminal, print_session, show_session
from app.sessions.demo import (
    CONSOLE_STEPS,
    DEFAULT_RANKS,
    HEADLESS_STEPS,
    MAX_RANKS,
    Demo,
    DemoOptions,
    check_options,
)
from app.sessions.options import SessionOptions


@click.command()
@click.option(
    "--steps",
    type=click.IntRange(min=1, max=10_000_000),
    help=f"Training steps [{HEADLESS_STEPS}; {CONSOLE_STEPS} in the console]",
)
@click.option(
    "--ranks", type=click.IntRange(1, MAX_RANKS), default=DEFAULT_RANKS, show_default=True, help="Ranks, over two nodes"
)
@click.option(
    "--fault", metavar="KIND:RANK@STEP", help=f"Do harm to a rank at a step, as freeze:2@10: {', '.join(AT_START)}"
)
@click.option("--headless", is_flag=True, help="No screen: lines on stderr, a summary on stdout")
@click.option("--json", "is_json", is_flag=True, help="The summary as one JSON object (implies --headless)")
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="Rendezvous port on loopback [a free one]")
@click.option(
    "--evidence",
    "evidence_dir",
    type=click.Path(file_okay=False, path_type=Path),
    help="Keep evidence of each incident there [none is kept]",
)
@record_option
@read_only_option
@takes_settings
def demo(*, headless: bool, is_json: bool, fault: str | None, steps: int | None, **how: Any) -> None:
    """Train a small GPT on this machine, over two private agents, and watch it; nothing is left behind."""
    is_headless = headless or is_json or not is_terminal()
    options = DemoOptions(
        num_ranks=how["ranks"],
        steps=steps or (HEADLESS_STEPS if is_headless else CONSOLE_STEPS),
        fault=parse_fault(fault) if fault else None,
        port=how["port"],
        session=SessionOptions(how["evidence_dir"], how["recording"], how["is_read_only"], how["settings"].thresholds),
    )
    check_options(options)
    if options.session.evidence_dir is not None:
        check_directory(options.session.evidence_dir)
    if is_headless:
        raise SystemExit(asyncio.run(print_session(Demo(options), options.fault, is_json=is_json)))
    raise SystemExit(asyncio.run(show_session(Demo(options), how["settings"].console)))
