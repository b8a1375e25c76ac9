"""Takes what looks like a secret out of records before they are kept. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from agent.wire.reports import decode_node_report, encode_node_report
from agent.wire.secret_mask import masked_text, may_hold_secret
from agent.wire.stacks import Stacks
from app.recording.records import LinesHeard, NoticeHeard, ReportHeard, StacksHeard
from ddpcore.wire import DECODE_ERRORS

if TYPE_CHECKING:
    from app.recording.records import Record


def masked(record: Record) -> Record:
    """Return a record that may be passed on."""
    match record:
        case ReportHeard(frame=frame):
            return msgspec.structs.replace(record, frame=_masked_frame(frame))
        case LinesHeard(lines=lines):
            shown = [msgspec.structs.replace(line, text=masked_values(line.text)) for line in lines]
            return msgspec.structs.replace(record, lines=shown)
        case StacksHeard(stacks=stacks) if stacks is not None:
            told = msgspec.convert(masked_values(msgspec.to_builtins(stacks)), Stacks)
            return msgspec.structs.replace(record, stacks=told)
        case NoticeHeard(text=text):
            return msgspec.structs.replace(record, text=masked_values(text))
    return record


def _masked_frame(frame: bytes) -> bytes:
    if not may_hold_secret(frame):
        return frame  # nearly all: only tracebacks and the like hold text of a program
    try:
        return _masked_packed(frame)
    except DECODE_ERRORS:
        # A field that this version does not know may hold what only a typed decoder, which skips it, gets over.
        return _masked_packed(encode_node_report(decode_node_report(frame)))


def _masked_packed(packed: bytes) -> bytes:
    return msgspec.msgpack.encode(masked_values(msgspec.msgpack.decode(packed)))


def masked_values(value: Any) -> Any:
    """Return built-in values with every string masked."""
    if isinstance(value, str):
        return masked_text(value)[: len(value)]  # no bound that the text has kept may be broken
    if isinstance(value, list):
        return [masked_values(one) for one in value]
    if isinstance(value, dict):
        return {name: masked_values(one) for name, one in value.items()}
    return value
