"""Text of a file system or of the kernel, which need not be UTF-8, as JSON can hold it. Pure."""

from __future__ import annotations


def utf8_text(text: str, max_chars: int) -> str:
    """Return text in which each byte that was no UTF-8 has a mark in its place.

    Args:
        text: With such bytes as lone surrogates. Source: PEP 383.
        max_chars: What is beyond is cut off.
    """
    return text.encode(errors="surrogateescape").decode(errors="replace")[:max_chars]
