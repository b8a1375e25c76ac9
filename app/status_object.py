"""What `--json` prints: the view's rows as one object."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from app.rows import SCHEMA
from app.words import json_value

if TYPE_CHECKING:
    from app.view import View


def status_object(view: View) -> dict[str, Any]:
    """Return the object of `--json`: built-in types only, numbers rounded, what is not known as None."""
    job = view.job()
    rows = {
        "nodes": view.nodes(),
        "jobs": [] if job is None else [job],
        "other_jobs": view.other_jobs(),
        "gpus": view.gpus(),
        "ranks": view.ranks(),
        "barriers": view.barriers(),
        "verdicts": view.verdicts(),
    }
    return {"schema": SCHEMA} | {key: json_value(value) for key, value in rows.items()}
