"""Hosts that let a person in who gives the right answers, for tests of who asks, and when."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import TYPE_CHECKING

from app.errors import AnswerNeededError, AppError, HostUnreachableError
from app.fleet.agent_link import AgentLink

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from app.ssh.io_thread import ByteChannel
    from app.ssh.questions import Prompter
    from app.ssh.remote_command import Finished


class Keys:
    """A key that several doors take, and its passphrase: as `app.ssh.keys` it is asked for once."""

    def __init__(self, passphrase: str) -> None:
        self.passphrase = passphrase
        self.is_open = False
        self.lock = threading.Lock()


class Door(AgentLink):
    """The way to a host that has been lost, behind a key or a question of its own.

    Attributes:
        num_tries: How often somebody has gone there, and with questions in `num_asked`.
        refusal: Raised by every try from now on.
        told: Said before the question.
    """

    def __init__(self, host: str, prompter: Prompter, wanted: Keys | tuple[str, str, bool]) -> None:
        """`wanted` is a key, or a question, its answer, and whether that may be seen."""
        super().__init__(host, "python3")
        self.num_tries = self.num_asked = 0
        self.refusal: AppError | None = None
        self.told = ""
        self._prompter = prompter
        self._wanted = wanted
        self._is_in = False

    @property
    def directory(self) -> Path:
        return Path("/nowhere")

    @property
    def is_alive(self) -> bool:
        return self._is_in

    def own_absence(self) -> AnswerNeededError:
        """Return why there is no way in."""
        return AnswerNeededError(self.host, f"root@{self.host} wants an answer")

    def connect(self) -> None:
        raise self.own_absence()

    def go_again(self, *, asks: bool = False) -> None:
        self.reconnect(asks=asks)

    def open_sockets(self, on_frame: Callable[[bytes], None]) -> None:
        """There is no road."""

    def reconnect(self, *, asks: bool = False) -> None:
        self.num_tries += 1
        self.num_asked += asks
        if self.refusal is not None:
            raise self.refusal
        if self._is_right(asks=asks):
            self._is_in = True
        elif asks:
            failure = HostUnreachableError(self.host, "takes none of our keys")
            failure.is_answerable = True
            raise failure
        else:
            raise self.own_absence()

    def _is_right(self, *, asks: bool) -> bool:
        if isinstance(self._wanted, tuple):
            question, right, is_shown = self._wanted
            if asks and self.told:
                self._prompter.show(self.told)
            return asks and self._prompter.ask(question, is_shown=is_shown) == right
        keys = self._wanted
        with keys.lock:
            if asks and not keys.is_open:
                keys.is_open = self._prompter.ask(f"Passphrase of the key k (for {self.host}): ") == keys.passphrase
            return keys.is_open

    def close(self) -> None:
        self._is_in = False

    def send_file(self, near: Path, far: str) -> bool:
        raise NotImplementedError

    def _execute(self, argv: Sequence[str], given: bytes = b"", timeout_s: float | None = None) -> Finished:
        raise NotImplementedError

    def _open(self, argv: Sequence[str]) -> ByteChannel:
        raise NotImplementedError
