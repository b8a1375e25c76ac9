"""Puts the questions of logins to the user at the console: passphrases, passwords, host keys.

A `Prompter` asks; its implementations know what a terminal is.

`QuestionDesk` takes questions from the login threads and hands them to a console, one at a time. Until a console
attends to it, they are asked elsewhere: on the terminal, before there is a screen. Once the console has left, nobody is
asked: a connection that was begun with it would ask on a terminal that is the shell's again. An answer goes to the
thread that has asked, and is kept here only until then.
"""

from __future__ import annotations

import queue
import threading
from typing import NamedTuple, Protocol

from app.text import LINE_LIMIT, clean

ANSWER_WITHIN_S = 120.0
"""Seconds that sshd usually waits (LoginGraceTime)."""


class Prompter(Protocol):
    """Asks one question at a time, from whichever thread. All text passed to it is safe to show."""

    def can_ask(self) -> bool:
        """Return whether a user is there to be asked."""
        ...

    def ask(self, text: str, *, is_shown: bool = False) -> str | None:
        """Return what a user types; blocks, within bounds. None when nobody answers.

        Args:
            text: The question, which may have several lines.
            is_shown: Show the answer while it is typed.
        """
        ...

    def show(self, text: str) -> None:
        """Show a text that wants no answer."""
        ...


class Nobody:
    """A prompter without a user."""

    def can_ask(self) -> bool:
        """Return False."""
        return False

    def ask(self, text: str, *, is_shown: bool = False) -> str | None:
        """Return None."""

    def show(self, text: str) -> None:
        """Discard the text."""


class Question(NamedTuple):
    """A question for the user. All text is safe to show.

    Attributes:
        number: Unique number of the question.
        host: Name of the host, as the user typed it.
        notes: Texts shown before it, line by line.
        lines: The question.
        is_shown: Whether the answer may be seen; else it is a secret.
    """

    number: int
    host: str
    notes: tuple[str, ...]
    lines: tuple[str, ...]
    is_shown: bool


class QuestionDesk:
    """A `Prompter`. `can_ask`, `ask` and `show` are for login threads, the rest is for the console's loop."""

    def __init__(self, elsewhere: Prompter) -> None:
        """`elsewhere` asks while no console attends."""
        self._elsewhere = elsewhere
        self._turn = threading.Lock()
        """Held by the thread whose question is open."""
        self._lock = threading.Lock()
        self._is_attended = False
        self._is_left = False
        """Whether a console has attended, and has left."""
        self._host = ""
        """Host whose questions may come; empty while none may."""
        self._is_put_off = False
        self._notes: list[str] = []
        self._question: Question | None = None
        self._answers: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._number = 0

    def can_ask(self) -> bool:
        """Return whether a user is there to be asked."""
        if self._is_left:
            return False
        return bool(self._host) and not self._is_put_off if self._is_attended else self._elsewhere.can_ask()

    def ask(self, text: str, *, is_shown: bool = False) -> str | None:
        """Return what the user types; None after two minutes, or if the user puts the question off."""
        if not self._is_attended:
            return None if self._is_left else self._elsewhere.ask(text, is_shown=is_shown)
        with self._turn:
            with self._lock:
                if not self.can_ask():
                    return None
                self._number += 1
                notes, self._notes = tuple(self._notes), []
                answers = self._answers = queue.SimpleQueue()
                lines = tuple(map(_clean, text.splitlines()))
                self._question = Question(self._number, self._host, notes, lines, is_shown)
            try:
                answer = answers.get(timeout=ANSWER_WITHIN_S)
            except queue.Empty:
                answer = None
            with self._lock:
                self._question = None
                self._is_put_off |= answer is None
            return answer

    def show(self, text: str) -> None:
        """Show a text before the next question, or, where none comes, at the end."""
        if not self._is_attended:
            self._elsewhere.show(text)
            return
        with self._lock:
            self._notes += map(_clean, text.splitlines())

    def attend(self) -> None:
        """Take the questions from now on."""
        with self._lock:
            self._is_attended, self._is_left = True, False

    def leave(self) -> None:
        """Take no more questions, and let none be asked elsewhere; an open one stays unanswered."""
        with self._lock:
            self._is_attended, self._is_left = False, True
            self._host = ""
            self._answers.put(None)

    def begin(self, host: str) -> None:
        """Allow questions about a host, until `end`."""
        with self._lock:
            self._host, self._is_put_off = host, False

    def end(self) -> bool:
        """Allow no more questions; return whether the user has put one off."""
        with self._lock:
            self._host = ""
            self._answers.put(None)
            return self._is_put_off

    def drain_notes(self) -> list[str]:
        """Return the texts that belong to no question."""
        with self._lock:
            if self._host:
                return []
            notes, self._notes = self._notes, []
            return notes

    @property
    def question(self) -> Question | None:
        """The open question; None without one."""
        return self._question

    def answer(self, number: int, text: str | None) -> None:
        """Answer a question, unless it is over already; None puts it off."""
        with self._lock:
            if self._question is not None and self._question.number == number:
                self._question = None
                self._answers.put(text)


def _clean(line: str) -> str:
    return clean(line, LINE_LIMIT)
