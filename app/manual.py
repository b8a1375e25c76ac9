"""The manual, a file of `app/help` for each topic: `rankdeck help` prints it, the console shows parts. Pure."""

from __future__ import annotations

from importlib.resources import files

TOPICS = (
    "cluster",
    "ssh",
    "relay",
    "slurm",
    "launchers",
    "exec",
    "doctor",
    "verdicts",
    "evidence",
    "settings",
    "keys",
    "security",
    "exit-codes",
    "engine",
    "checkpoints",
    "samplers",
    "barriers",
)
"""Topics in the order of the list; each is a file of `app/help`."""


def markdown(topic: str) -> str:
    """Return the text of a topic's file."""
    return (files("app") / "help" / f"{topic}.md").read_text(encoding="utf-8")
