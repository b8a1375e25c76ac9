"""The command `rankdeck`, with what it shows written down: `python -P observed_run.py LOG run --headless ...`.

Nothing of the command is changed. The lines of LOG are JSON: what stands at which moment, as rows.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.cli.headless import Headless
from app.cli.main import main
from app.text import json_value

if TYPE_CHECKING:
    from app.view.view import View

LOOK_S = 0.5


class Notebook:
    """Writes down each change of the verdicts, and the headline twice a second."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stood: list[list[Any]] = []
        self._written_at_s = float("-inf")

    def look(self, view: View, now_s: float) -> None:
        verdicts: list[Any] = [json_value(verdict) for verdict in view.verdicts()]
        stands = [[verdict[key] for key in ("cause", "culprits", "severity", "op", "where")] for verdict in verdicts]
        if stands == self._stood and now_s - self._written_at_s < LOOK_S:
            return
        self._stood, self._written_at_s = stands, now_s
        headline = view.headline()
        look = {"at_s": now_s, "headline": headline.text, "severity": headline.severity, "verdicts": verdicts}
        with self._path.open("a", encoding="utf-8") as log:
            log.write(json.dumps(look) + "\n")


def observe(notebook: Notebook) -> None:
    """Let the notebook see each view that is shown."""
    show = Headless._print_view

    def show_and_note(self: Headless, view: View, now_s: float) -> None:
        show(self, view, now_s)
        notebook.look(view, now_s)

    Headless._print_view = show_and_note  # type: ignore[method-assign]


if __name__ == "__main__":
    observe(Notebook(Path(sys.argv.pop(1))))
    main()
