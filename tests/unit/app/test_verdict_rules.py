"""`rankdeck help verdicts` has each cause: what the console says of it, what is compared and unknown, what to do."""

from __future__ import annotations

import re

from app.diagnosis.causes import Cause
from app.manual import markdown
from tests.unit.app.view.test_verdict_words import SENTENCES

SECTIONS = [
    (name, [" ".join(item.replace("`", "").split()) for item in items.strip().split("\n- ")])
    for name, items in re.findall(r"^## (.+?)\n\n- (.+?\n)(?=\n|\Z)", markdown("verdicts"), re.MULTILINE | re.DOTALL)
]


def test_every_cause_has_a_section() -> None:
    assert {cause for name, _ in SECTIONS for cause in name.split(", ")} == set(Cause)


def test_each_section_says_what_the_console_says_and_what_to_do() -> None:
    said = {text for _, text in SENTENCES}
    for name, items in SECTIONS:
        kinds = dict.fromkeys(item.partition(": ")[0] for item in items)
        assert list(kinds) == ["Sentence", "From", "Not known", "Do"], name
        assert [
            item for item in items if item.startswith("Sentence: ") and item.removeprefix("Sentence: ") not in said
        ] == []
