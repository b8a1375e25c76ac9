"""What the console's help says of verdicts: every cause, in the words of `rankdeck help verdicts`."""

from __future__ import annotations

import re

from app.cli.help import markdown
from app.diagnosis.causes import Cause
from app.view.verdict_hints import VERDICT_RULES, VerdictRule


def rules_of_the_manual() -> list[VerdictRule]:
    """Return the sections of its page."""
    sections = re.findall(
        r"^## (.+?)\n\n- Named: (.+?)\.\n- Not known: (.+?)\.\n$", markdown("verdicts"), re.MULTILINE | re.DOTALL
    )
    return [VerdictRule(*(" ".join(part.split()) for part in section)) for section in sections]


def test_the_console_has_the_rules_of_the_manual() -> None:
    assert rules_of_the_manual() == list(VERDICT_RULES)


def test_every_cause_has_a_rule() -> None:
    with_rules = {name.strip() for rule in VERDICT_RULES for name in rule.verdict.split(",")}
    assert {cause.value for cause in Cause} <= with_rules
