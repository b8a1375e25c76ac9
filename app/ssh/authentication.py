"""Getting in: by keys, then by what a person answers, in as many parts as the host wants.

Source: RFC 4252 (partial success), RFC 4256 (keyboard-interactive); ssh_config(5), PreferredAuthentications.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import paramiko

from app.errors import AnswerNeededError, HostUnreachableError
from app.ssh.config import METHODS
from app.ssh.keys import KeyLockedError, KeyQuery, KeyUnreadableError, agent_keys, public_part
from app.text import LINE_LIMIT, clean

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Sequence

    from app.ssh.config import SshSettings
    from app.ssh.keys import Keyring
    from app.ssh.transport import Transport

REPLY_TIMEOUT_S = 10.0
"""For the host to say something to an answer."""
INTERVIEW_S = 3600.0
"""For all of an interview; the person has less time for each answer, and sshd less patience (LoginGraceTime)."""
MAX_ROUNDS = 16
"""Of questions in one interview."""
MAX_FIELDS = 16
"""Of one round."""
MAX_LINES = 20
"""Of what a host says beside its questions."""

MethodsLeft = list[str]
"""What the host wants besides; empty once it has let us in."""
Field = tuple[str, bool]
"""A question, and whether the answer may be seen."""


def authenticate(transport: Transport, settings: SshSettings, keyring: Keyring, *, asks: bool) -> None:
    """Get in.

    Args:
        transport: Its host has been found to be who it is.
        settings: Which user, which keys, which ways.
        keyring: Keys and secrets that are known, and whoever can be asked for others.
        asks: Ask the person; without this, what is known must do.

    Raises:
        AnswerNeededError: The host wants answers, and there is nobody to give them.
        HostUnreachableError: It does not let us in.
        TimeoutError: It does not answer.
    """
    with agent_keys(settings) as keys:
        login = _Login(transport, settings, keyring, asks=asks)
        ways = {
            "publickey": login.by_keys(keys),
            "keyboard-interactive": login.by_interviews(),
            "password": login.by_passwords(),
        }
        left = login.first_request()
        while left:
            going_on = (next(ways[method], None) for method in settings.methods if method in left)
            progress = next((found for found in going_on if found is not None), None)
            if progress is None:
                raise login.refusal(left)
            left = progress


class _Login:
    """One way into one host. Each `by_` yields what is still wanted whenever a part of it has been taken."""

    def __init__(self, transport: Transport, settings: SshSettings, keyring: Keyring, *, asks: bool) -> None:
        self._transport = transport
        self._settings = settings
        self._keyring = keyring
        self._prompter = keyring.prompter
        self._account = (settings.user, settings.key_name)
        self._asks = asks
        self._can_ask = asks and settings.num_prompts > 0 and self._prompter.can_ask()
        self._tried: list[str] = []
        self._locked: list[str] = []
        self._openable: list[str] = []
        """Of those that are locked, what the host would take."""

    def first_request(self) -> MethodsLeft:
        """Return what the host wants of whoever has nothing."""
        try:
            return self._transport.auth_none(self._settings.user)
        except paramiko.BadAuthenticationType as error:
            return error.allowed_types
        except paramiko.AuthenticationException as error:
            self._check(error)
            return list(METHODS)

    def by_keys(self, keys_of_agent: Sequence[paramiko.PKey]) -> Iterator[MethodsLeft]:
        """Offer keys: those of ssh-agent, those of files that are open, those that a passphrase opens."""
        for key in keys_of_agent:
            yield from self._offer(key, f"{key.get_name()} of ssh-agent")
        for file in self._settings.identity_files:
            try:
                if Path(file).exists():
                    yield from self._offer(self._keyring.key_of(file), file)
            except KeyLockedError:
                self._locked.append(file)
            except KeyUnreadableError:
                continue
        for file in self._locked:
            if not self._would_be_taken(file):
                self._tried.append(clean(file, LINE_LIMIT))
                continue
            self._openable.append(file)
            if not self._can_ask:
                continue
            unlocked = self._keyring.unlock(file, self._settings.alias, self._settings.num_prompts)
            if unlocked is not None:
                yield from self._offer(unlocked, file)

    def by_passwords(self) -> Iterator[MethodsLeft]:
        """Offer the password that is known, then those that the person types."""
        known = self._keyring.password_of(self._account)
        if known is not None:
            left = self._offer_password(known)
            if left is not None:
                yield left
                return
            self._keyring.set_password(self._account, None)
        for _ in range(self._settings.num_prompts if self._can_ask else 0):
            typed = self._prompter.ask(f"{self._whom}'s password: ")
            if not typed:
                return
            left = self._offer_password(typed)
            if left is not None:
                self._keyring.set_password(self._account, typed)
                yield left
                return
            self._prompter.show(f"{self._whom} does not take that password.")

    def by_interviews(self) -> Iterator[MethodsLeft]:
        """Pass the host's questions on to the person."""
        for _ in range(self._settings.num_prompts if self._can_ask else 0):
            left = self._taken(self._interview)
            if left is not None:
                self._keyring.set_asked_again(self._account)
                yield left
                return
            self._prompter.show(f"{self._whom} does not take that.")

    def refusal(self, left: MethodsLeft) -> HostUnreachableError:
        """Return why we are not let in, and what to do."""
        settings = self._settings
        offered = f"takes none of our keys ({', '.join(self._tried)})" if self._tried else "was offered no key"
        hint = (
            f"ssh-add {self._openable[0]}"
            if self._openable
            else f"put your public key there: ssh-copy-id {settings.alias}"
        )
        answered = [method for method in settings.methods if method in left and method != "publickey"]
        where = f"{settings.user}@{settings.hostname}"
        if not answered or self._can_ask:
            refusal = HostUnreachableError(settings.alias, f"{where} {offered}", hint)
        else:
            wanted = f"wants an answer by {' or '.join(answered)}"
            if self._asks:
                wanted += ", which can only be asked for in a terminal"
            # Where a key was enough before, it may be again: an agent comes back, a home directory is mounted.
            is_hopeless = self._asks or self._keyring.has_asked_user(self._account)
            kind = AnswerNeededError if is_hopeless else HostUnreachableError
            refusal = kind(settings.alias, f"{where} {offered}; it {wanted}", hint)
        refusal.is_answerable = settings.num_prompts > 0 and bool(answered or self._openable)
        return refusal

    @property
    def _whom(self) -> str:
        return clean(f"{self._settings.user}@{self._settings.alias}")

    def _offer_password(self, password: str) -> MethodsLeft | None:
        return self._taken(lambda: self._transport.auth_password(self._settings.user, password, fallback=False))

    def _offer(self, key: paramiko.PKey, name: str) -> Iterator[MethodsLeft]:
        self._tried.append(clean(name, LINE_LIMIT))
        left = self._taken(lambda: self._transport.auth_publickey(self._settings.user, key))
        if left is not None:
            yield left

    def _would_be_taken(self, file: str) -> bool:
        """Say whether a passphrase is worth asking for: the host would take the key, or nobody can tell."""
        key = public_part(file)
        return key is None or KeyQuery(self._transport, key).ask(self._settings.user, REPLY_TIMEOUT_S)

    def _taken(self, offer: Callable[[], MethodsLeft]) -> MethodsLeft | None:
        """Return what is still wanted if an offer was taken; None if it was not."""
        try:
            return offer()
        except paramiko.AuthenticationException as error:
            self._check(error)
            return None

    def _check(self, error: paramiko.AuthenticationException) -> None:
        """Return if an offer was refused, and another one would be heard."""
        if "timeout" in str(error).lower():
            raise TimeoutError from error  # paramiko has no kind of its own for it; nobody has refused us
        if not self._transport.is_active():
            raise error  # too much was tried

    def _interview(self) -> MethodsLeft:
        """Let the host ask what it wants; the person answers in this thread, which Ctrl-C ends."""
        interview = _Interview(self._transport, self._settings.user)
        with contextlib.closing(interview.questions()) as questions:
            for title, instructions, fields in questions:
                lines = [line for text in (title, instructions) for line in text.strip().splitlines()[:MAX_LINES]]
                if lines:
                    self._prompter.show("\n".join(f"({self._whom}) {clean(line)}" for line in lines))
                interview.answer([self._answer(text, is_shown=is_shown) for text, is_shown in fields])
        return interview.left

    def _answer(self, question: str, *, is_shown: bool) -> str:
        answer = self._prompter.ask(f"({self._whom}) {clean(question).rstrip()} ", is_shown=is_shown)
        if answer is None:
            raise AnswerNeededError(self._settings.alias, f"{self._whom} has asked, and nobody has answered")
        return answer


class _Interview:
    """One keyboard-interactive login. paramiko asks in the transport's thread; here it is a dialogue of this one.

    Attributes:
        left: What the host wants besides, after all questions.
    """

    def __init__(self, transport: Transport, user: str) -> None:
        self.left: MethodsLeft = []
        self._transport = transport
        self._user = user
        self._replies: queue.SimpleQueue[tuple[str, str, list[Field]] | MethodsLeft | Exception] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[list[str] | None] = queue.SimpleQueue()
        self._num_rounds = 0

    def questions(self) -> Generator[tuple[str, str, list[Field]]]:
        """Yield what the host asks; each wants an `answer`. Close it: until then the connection cannot be ended.

        Raises:
            AuthenticationException: It was not the right one.
            TimeoutError: The host has fallen silent.
        """
        patience_s, self._transport.auth_timeout = self._transport.auth_timeout, INTERVIEW_S
        threading.Thread(target=self._run, name="rankdeck-interview", daemon=True).start()
        try:
            while True:
                try:
                    reply = self._replies.get(timeout=REPLY_TIMEOUT_S)
                except queue.Empty:
                    raise TimeoutError from None
                if isinstance(reply, Exception):
                    raise reply
                if isinstance(reply, list):
                    self.left = reply
                    return
                yield reply
        finally:
            self._transport.auth_timeout = patience_s
            self._answers.put(None)

    def answer(self, answers: list[str]) -> None:
        """Answer the last questions."""
        self._answers.put(answers)

    def _run(self) -> None:
        try:
            self._replies.put(self._transport.auth_interactive(self._user, self._ask))
        except (paramiko.SSHException, EOFError, OSError) as error:
            self._replies.put(error)

    def _ask(self, title: str, instructions: str, fields: list[Field]) -> list[str]:
        self._num_rounds += 1
        if self._num_rounds > MAX_ROUNDS or len(fields) > MAX_FIELDS:
            raise paramiko.SSHException("it asks without end")
        self._replies.put((title, instructions, fields))
        answers = self._answers.get()
        if answers is None:
            raise paramiko.SSHException("nobody has answered")
        return answers
