"""Replaces a function of torch under each name by which torch's modules have it."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


def replace(module_name: str, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Put what `wrap` makes of a function in its place.

    Args:
        module_name: The module that has it: a module of torch that is imported already.
        name: The function there. Other modules of torch may have imported it under the same name.
        wrap: Gets the function, returns what stands for it.
    """
    original = getattr(sys.modules[module_name], name)
    wrapped = wrap(original)
    for other, module in list(sys.modules.items()):
        if other.partition(".")[0] == "torch" and getattr(module, "__dict__", {}).get(name) is original:
            setattr(module, name, wrapped)
