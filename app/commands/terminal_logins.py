"""The logins of this command, whichever hosts they lead to: it has one terminal, and one person.

Imported where the first host is gone to: it costs paramiko.
"""

from __future__ import annotations

from app.commands.terminal import TerminalPrompter
from app.ssh.login import Logins
from app.ssh.question_desk import QuestionDesk

DESK = QuestionDesk(TerminalPrompter())
"""Asks on the terminal until a console takes that over."""
LOGINS = Logins(DESK)
