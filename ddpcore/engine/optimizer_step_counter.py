"""Has any optimizer stepped? Seen through torch's own hook, whoever calls it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

from torch.optim.optimizer import register_optimizer_step_post_hook

if TYPE_CHECKING:
    from types import TracebackType

    from torch.utils.hooks import RemovableHandle


class OptimizerStepCounter:
    """Notes steps of all optimizers of this process while its `with` block lasts."""

    def __init__(self) -> None:
        self._has_stepped = False
        self._handle: RemovableHandle | None = None

    def __enter__(self) -> Self:
        self._handle = register_optimizer_step_post_hook(self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._handle is not None:
            self._handle.remove()

    def take(self) -> bool:
        """Say whether an optimizer has stepped since the last call."""
        has_stepped, self._has_stepped = self._has_stepped, False
        return has_stepped

    def _note(self, *_: Any) -> None:
        self._has_stepped = True
