"""Puts the questions of logins to the user at the console: passphrases, passwords, host keys.

`Prompter` is what asks; its implementations know what a terminal is.

`QuestionDesk` is where the threads that log in leave their questions, and a console takes them from: one at a time.
Until a console attends to it they are asked elsewhere: on the terminal, before there is a screen. Once the console has
left, nobody is asked: a connection that was begun with it would ask on a terminal that is the shell's again. An answer
goes to the thread that has asked, and is kept here no longer than it takes to hand it over.
"""

from __future__ import annotations

import queue
import threading
from typing import NamedTuple, Protocol

from app.text import LINE_LIMIT, clean

ANSWER_WITHIN_S = 120.0
"""So long sshd waits as a rule (LoginGraceTime)."""


class Prompter(Protocol):
    """Asks one question at a time, from whichever thread. All text that it is given is safe to show."""

    def can_ask(self) -> bool:
        """Say whether somebody is there to be asked."""
        ...

    def ask(self, text: str, *, is_shown: bool = False) -> str | None:
        """Return what a person types; blocks, within bounds. None when nobody answers.

        Args:
            text: The question, which may have several lines.
            is_shown: Let the answer be seen while it is typed.
        """
        ...

    def show(self, text: str) -> None:
        """Say something that wants no answer."""
        ...


class Nobody:
    """Nobody is there to be asked or told."""

    def can_ask(self) -> bool:
        """Return False."""
        return False

    def ask(self, text: str, *, is_shown: bool = False) -> str | None:
        """Return None."""

    def show(self, text: str) -> None:
        """Say it to nobody."""


class Question(NamedTuple):
    """What a person is asked. All text is safe to show.

    Attributes:
        number: Of this question and no other.
        host: As the person calls it.
        notes: What was said before it, line by line.
        lines: The question.
        is_shown: Whether the answer may be seen; else it is a secret.
    """

    number: int
    host: str
    notes: tuple[str, ...]
    lines: tuple[str, ...]
    is_shown: bool


class QuestionDesk:
    """A `Prompter`. `can_ask`, `ask` and `show` are for threads that log in, the rest is for the console's loop."""

    def __init__(self, elsewhere: Prompter) -> None:
        """`elsewhere` asks while no console attends."""
        self._elsewhere = elsewhere
        self._turn = threading.Lock()
        """Held by the thread whose question it is."""
        self._lock = threading.Lock()
        self._is_attended = False
        self._is_left = False
        """A console has attended, and does no more."""
        self._host = ""
        """Which is gone to with questions; empty while none is."""
        self._is_put_off = False
        self._notes: list[str] = []
        self._question: Question | None = None
        self._answers: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._number = 0

    def can_ask(self) -> bool:
        """Say whether somebody is there to be asked."""
        if self._is_left:
            return False
        return bool(self._host) and not self._is_put_off if self._is_attended else self._elsewhere.can_ask()

    def ask(self, text: str, *, is_shown: bool = False) -> str | None:
        """Return what the person types; None when they do not for two minutes, or do not want to now."""
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
        """Say something before the next question, or, where none comes, at the end."""
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
        """Take no more questions, nor let anybody else be asked; one that is open is not answered."""
        with self._lock:
            self._is_attended, self._is_left = False, True
            self._host = ""
            self._answers.put(None)

    def begin(self, host: str) -> None:
        """Let questions come, of the way to a host; `end` ends it."""
        with self._lock:
            self._host, self._is_put_off = host, False

    def end(self) -> bool:
        """Let no more questions come; return whether the person has put one off."""
        with self._lock:
            self._host = ""
            self._answers.put(None)
            return self._is_put_off

    def drain_notes(self) -> list[str]:
        """Return what was said and belongs to no question."""
        with self._lock:
            if self._host:
                return []
            notes, self._notes = self._notes, []
            return notes

    @property
    def question(self) -> Question | None:
        """What the person is asked now."""
        return self._question

    def answer(self, number: int, text: str | None) -> None:
        """Answer a question, unless it is over already; None is not now."""
        with self._lock:
            if self._question is not None and self._question.number == number:
                self._question = None
                self._answers.put(text)


def _clean(line: str) -> str:
    return clean(line, LINE_LIMIT)
