"""Authentication: by keys, then by the user's answers, in as many steps as the host wants.

Source: RFC 4252 (partial success), RFC 4256 (keyboard-interactive); ssh_config(5), PreferredAuthentications.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import paramiko
from paramiko.agent import AgentKey

from app.errors import AnswerNeededError, HostUnreachableError, LoginRefusedError
from app.ssh.config import METHODS
from app.ssh.keys import (
    KeyLockedError,
    KeyQuery,
    KeyUnreadableError,
    agent_keys,
    is_signing,
    public_part,
    public_part_of,
)
from app.ssh.known_hosts import fingerprint
from app.ssh.questions import ANSWER_WITHIN_S
from app.text import LINE_LIMIT, clean

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Sequence

    from app.ssh.config import SshSettings
    from app.ssh.keys import Keyring, PublicPart
    from app.ssh.transport import Transport

REPLY_TIMEOUT_S = 10.0
"""Seconds for the host to reply to an answer."""
INTERVIEW_S = 3600.0
"""Seconds for one keyboard-interactive login; each answer has less, and sshd allows less in all (LoginGraceTime)."""
POLL_S = 0.1
"""Seconds between looks at whether ssh-agent has signed; paramiko looks as often for an answer."""
MAX_ROUNDS = 16
"""Rounds of questions in one keyboard-interactive login."""
MAX_FIELDS = 16
"""Questions in one round."""
MAX_LINES = 20
"""Lines of text shown beside a host's questions."""

_REFUSALS = frozenset({2, 14})
"""Codes with which a host hangs up after too many attempts: 2 is sshd's, 14 that no methods are left. Others pass: of
too many connections, or a host that shuts down. Source: RFC 4253, 11.1."""

MethodsLeft = list[str]
"""Methods that the host still wants; empty once the login has succeeded."""
Field = tuple[str, bool]
"""A question, and whether the answer may be shown."""


def authenticate(transport: Transport, settings: SshSettings, keyring: Keyring, *, asks: bool) -> None:
    """Log in.

    Args:
        transport: Its host's key has been verified.
        settings: The user, the keys and the methods.
        keyring: Known keys and secrets, and the prompter for others.
        asks: Ask the user; else only known secrets are used.

    Raises:
        AnswerNeededError: The host wants answers, and no user can be asked.
        LoginRefusedError: It refuses our keys, or hangs up over them.
        HostUnreachableError: It lets nobody in who offers no key.
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
    """One login to one host. Each `by_` generator yields the methods still wanted after each accepted step."""

    def __init__(self, transport: Transport, settings: SshSettings, keyring: Keyring, *, asks: bool) -> None:
        self._transport = transport
        self._settings = settings
        self._keyring = keyring
        self._prompter = keyring.prompter
        self._account = (settings.user, settings.key_name)
        self._asks = asks
        self._can_ask = asks and settings.num_prompts > 0 and self._prompter.can_ask()
        self._tried: list[str] = []
        self._offered: set[PublicPart] = set()
        self._locked: list[str] = []
        self._openable: list[str] = []
        """Locked keys that the host would accept."""

    def first_request(self) -> MethodsLeft:
        """Return the methods the host accepts, found by a request without credentials."""
        try:
            return self._transport.auth_none(self._settings.user)
        except paramiko.BadAuthenticationType as error:
            return error.allowed_types
        except paramiko.AuthenticationException as error:
            self._check(error)
            return list(METHODS)

    def by_keys(self, keys_of_agent: Sequence[AgentKey]) -> Iterator[MethodsLeft]:
        """Offer keys: those of ssh-agent, those of unlocked files, then those that a passphrase unlocks."""
        for key in keys_of_agent:
            name = f"{key.get_name()} {key.comment or fingerprint(key.asbytes())} of ssh-agent"
            yield from self._offer(key, name)
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
        """Offer the known password, then those that the user types."""
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
        """Pass the host's questions on to the user."""
        for _ in range(self._settings.num_prompts if self._can_ask else 0):
            left = self._taken(self._interview)
            if left is not None:
                self._keyring.set_asked_again(self._account)
                yield left
                return
            self._prompter.show(f"{self._whom} does not take that.")

    def refusal(self, left: MethodsLeft) -> HostUnreachableError:
        """Return the error for a refused login, with a hint."""
        settings = self._settings
        offered = f"takes none of our keys ({', '.join(self._tried)})" if self._tried else "was offered no key"
        hint = (
            f"ssh-add {self._openable[0]}"
            if self._openable
            else f"put your public key there: ssh-copy-id {settings.alias}"
        )
        answered = [method for method in settings.methods if method in left and method != "publickey"]
        where = f"{settings.user}@{settings.hostname}"
        refused = LoginRefusedError if self._tried else HostUnreachableError
        if not answered or self._can_ask:
            refusal = refused(settings.alias, f"{where} {offered}", hint)
        else:
            wanted = f"wants an answer by {' or '.join(answered)}"
            if self._asks:
                wanted += ", which can only be asked for in a terminal"
            # A host that accepted a key before may do so again once ssh-agent offers it.
            is_hopeless = self._asks or self._keyring.has_asked_user(self._account)
            kind = AnswerNeededError if is_hopeless else refused
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
        part = public_part_of(key)
        if part in self._offered:  # sshd counts attempts, also those with the same key
            return
        self._offered.add(part)
        left = self._taken(lambda: self._sign(key))
        if left is not None:
            yield left

    def _sign(self, key: paramiko.PKey) -> MethodsLeft:
        """Sign with a key; for one of ssh-agent a user has time to touch it or to confirm, which is not the host's."""
        transport, answered = self._transport, threading.Event()
        if not isinstance(key, AgentKey):
            return transport.auth_publickey(self._settings.user, key)
        began_s = signed_s = time.monotonic()
        transport.auth_publickey(self._settings.user, key, answered)
        while transport.is_active() and not answered.wait(POLL_S):
            now_s = time.monotonic()
            if is_signing(key):
                signed_s = now_s
                if now_s - began_s >= ANSWER_WITHIN_S:
                    detail = f"{self._tried[-1]} has not signed in {ANSWER_WITHIN_S:.0f} s"
                    hint = "touch the key, or confirm its use, in that time"
                    raise HostUnreachableError(self._settings.alias, detail, hint)
            elif now_s - signed_s >= transport.auth_timeout:
                raise TimeoutError
        assert transport.auth_handler is not None
        return transport.auth_handler.wait_for_response(answered)

    def _would_be_taken(self, file: str) -> bool:
        """Return whether to ask for a passphrase: the host would accept the key, or its public part is unknown."""
        key = public_part(file)
        if key is None:
            return True
        if key in self._offered:
            return False
        would_be_taken = KeyQuery(self._transport, key).ask(self._settings.user, REPLY_TIMEOUT_S)
        self._check_hung_up()
        if not self._transport.is_active():
            raise paramiko.SSHException("No existing session")  # no answer at all, which is none about the key
        return would_be_taken

    def _taken(self, offer: Callable[[], MethodsLeft]) -> MethodsLeft | None:
        """Return the methods still wanted if an offer was accepted; None if it was not."""
        try:
            return offer()
        except paramiko.AuthenticationException as error:
            self._check(error)
            return None

    def _check(self, error: paramiko.AuthenticationException) -> None:
        """Return if an offer was refused and another one can be made; else raise."""
        if "timeout" in str(error).lower():
            raise TimeoutError from error  # paramiko has no error of its own for a timeout; nothing was refused
        self._check_hung_up()
        if not self._transport.is_active():
            raise error

    def _check_hung_up(self) -> None:
        """Raise LoginRefusedError if the host has hung up over what was offered; sshd does after MaxAuthTries."""
        farewell = self._transport.disconnect
        if self._tried and farewell is not None and farewell.code in _REFUSALS:
            where = f"{self._settings.user}@{self._settings.hostname}"
            detail = f"{where} hangs up after {', '.join(self._tried)}: {clean(farewell.text, LINE_LIMIT)}"
            hint = "if it takes another key, name that alone: IdentityFile and IdentitiesOnly in ~/.ssh/config"
            raise LoginRefusedError(self._settings.alias, detail, hint)

    def _interview(self) -> MethodsLeft:
        """Run a keyboard-interactive login; the user answers in this thread, which Ctrl-C ends."""
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
        left: Methods that the host still wants, after all questions.
    """

    def __init__(self, transport: Transport, user: str) -> None:
        self.left: MethodsLeft = []
        self._transport = transport
        self._user = user
        self._replies: queue.SimpleQueue[tuple[str, str, list[Field]] | MethodsLeft | Exception] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[list[str] | None] = queue.SimpleQueue()
        self._num_rounds = 0

    def questions(self) -> Generator[tuple[str, str, list[Field]]]:
        """Yield the host's questions; each wants an `answer`. Close it: until then the connection cannot be ended.

        Raises:
            AuthenticationException: An answer was wrong.
            TimeoutError: The host does not reply.
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
