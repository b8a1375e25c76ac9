"""Hides what looks like a secret in environments and command lines before anybody is shown them.

By name (`WANDB_API_KEY`, `--hf-token`), by the form of known tokens, and the password in a URL. Rather too much
than too little: `KEYBOARD` is shown, `PRIMARY_KEY` is not; of tokens in the plural, models count them.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from agent.wire.jobs import JobSpec

MASK = "***"

_SECRET_NAME = re.compile(
    r"(?:^|[_\-.])(?:api|access|private|secret|auth)?[_\-]?"
    r"(?:keys?|token|secrets?|pass|passw(?:or)?ds?|passphrase|pwd|credentials?|creds|auth|cookies?|dsn|webhook|pat)"
    r"(?:$|[_\-.])|apikey|authtoken|sshpass|password|secret",
    re.IGNORECASE,
)
_TOKEN = re.compile(
    r"(?:\bhf_\w{16,}|\bsk-[\w\-]{16,}|\bgh[pousr]_\w{20,}|github_pat_\w{20,}|glpat-[\w\-]{16,}|xox[abeprs]-[\w\-]{10,}"
    r"|(?<=Bearer )\S{8,}|(?<=Basic )\S{8,}"
    r"|A[KS]IA[0-9A-Z]{16}|AIza[\w\-]{30,}|eyJ[\w\-]{10,}\.[\w\-]{10,}\.[\w\-]*)"
)
_URL_PASSWORD = re.compile(r"(?<=://)([^/\s:@]*):[^/\s]+(?=@)")


def masked_env(env: Mapping[str, str]) -> dict[str, str]:
    """Return an environment that may be shown."""
    return {name: MASK if value and _SECRET_NAME.search(name) else masked_text(value) for name, value in env.items()}


def masked_argv(argv: Iterable[str]) -> list[str]:
    """Return a command line that may be shown: `--token X`, `--token=X` and `TOKEN=X` lose their X."""
    shown = []
    hides_next = False
    for word in argv:
        name, has_value, _ = word.partition("=")
        is_secret = bool(_SECRET_NAME.search(name.lstrip("-")))
        is_option = word.startswith("-")
        if hides_next and not is_option:
            shown.append(MASK)
        elif is_secret and has_value:
            shown.append(f"{name}={MASK}")
        else:
            shown.append(masked_text(word))
        hides_next = is_option and is_secret and not has_value
    return shown


def masked_spec(spec: JobSpec) -> JobSpec:
    """Return a job that may be shown."""
    return msgspec.structs.replace(spec, env=masked_env(spec.env), command=masked_argv(spec.command))


_HINT = re.compile(rb"://|hf_|sk-|gh[pousr]_|github_pat_|glpat-|xox[abeprs]-|Bearer |Basic |A[KS]IA|AIza|eyJ")


def may_hold_secret(data: bytes) -> bool:
    """Return whether encoded text may hold what `masked_text` masks; False is certain."""
    return _HINT.search(data) is not None


def masked_text(text: str) -> str:
    """Return any text without known tokens and without passwords in URLs."""
    return _URL_PASSWORD.sub(rf"\1:{MASK}", _TOKEN.sub(MASK, text))
