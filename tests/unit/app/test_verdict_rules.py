"""What the help says of verdicts: every cause, in the words of README."""

from __future__ import annotations

from pathlib import Path

from app.rows import Cause
from app.wording.verdict_rules import VERDICT_RULES, VerdictRule

README = Path(__file__).parents[3] / "README.md"


def rules_of_readme() -> list[VerdictRule]:
    """Return the rows of its table, without marks."""
    _, _, table = README.read_text().partition("| verdict | who is named")
    rows = table.partition("\n\n")[0].splitlines()[2:]
    return [VerdictRule(*(cell.strip().replace("`", "") for cell in row.strip("|").split("|"))) for row in rows]


def test_the_help_has_the_rules_of_readme() -> None:
    assert rules_of_readme() == list(VERDICT_RULES)


def test_every_cause_has_a_rule() -> None:
    with_rules = {name.strip() for rule in VERDICT_RULES for name in rule.verdict.split(",")}
    assert {cause.value for cause in Cause} <= with_rules
