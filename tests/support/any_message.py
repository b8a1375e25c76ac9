"""Messages that the wire's decoders accept, whatever they claim: made from the types, or from a true one by lies.

Values stay within the limits of their types, and are few where they must meet: jobs, ranks, groups, epochs.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from hypothesis import strategies as st
from msgspec import inspect

if TYPE_CHECKING:
    from collections.abc import Mapping

Message = TypeVar("Message", bound=msgspec.Struct)

MAX_ITEMS = 4
TEXTS = ("", "all_reduce", "barrier", "\x1b]52;c\x07", "\u202e", "[/b]", "h1")
MET: Mapping[str, st.SearchStrategy[Any]] = {
    "job_id": st.sampled_from(["j", "k"]),
    "attempt": st.integers(0, 1),
    "epoch": st.sampled_from(["x", "y"]),
    "report_seq": st.integers(0, 20),
    "group": st.sampled_from(["0", "1", "ddpcore", "\x1b"]),
    "wire_version": st.just(1),
}
"""Fields whose values are drawn from these, unless a number is asked for there."""
NUMBERS = {"epoch": st.integers(0, 6)}


def messages(kind: type[Message], **fixed: object) -> st.SearchStrategy[Message]:
    """Return a strategy for a struct; `fixed` are values of its fields."""
    described = inspect.type_info(kind)
    assert isinstance(described, inspect.StructType)
    drawn = {field.name: _field(field.name, field.type) for field in described.fields if field.name not in fixed}
    return st.fixed_dictionaries(drawn).map(lambda values: kind(**values, **fixed))


def lies(true: Message) -> st.SearchStrategy[Message]:
    """Return a strategy for a struct that differs from a true one in one to three fields, however deep."""

    @st.composite
    def told(draw: st.DrawFn) -> Message:
        told = true
        for _ in range(draw(st.integers(1, 3))):
            told = _with_false_field(draw, told)
        return told

    return told()


def _with_false_field(draw: st.DrawFn, value: Message) -> Message:
    kind = inspect.type_info(type(value))
    assert isinstance(kind, inspect.StructType)
    field = draw(st.sampled_from([field for field in kind.fields if field.name != "wire_version"]))
    return msgspec.structs.replace(
        value, **{field.name: _lie(draw, getattr(value, field.name), field.name, field.type)}
    )


def _lie(draw: st.DrawFn, value: Any, name: str, kind: inspect.Type) -> Any:
    if isinstance(value, msgspec.Struct) and draw(st.integers(0, 5)):
        return _with_false_field(draw, value)
    if isinstance(kind, inspect.ListType) and value and draw(st.integers(0, 5)):
        at = draw(st.integers(0, len(value) - 1))
        return [*value[:at], _lie(draw, value[at], name, kind.item_type), *value[at + 1 :]]
    return draw(_field(name, kind))


def _field(name: str, kind: inspect.Type) -> st.SearchStrategy[Any]:
    if isinstance(kind, inspect.IntType) and name in NUMBERS:
        return NUMBERS[name]
    return MET[name] if name in MET and not isinstance(kind, inspect.UnionType) else _values(kind)


def _values(kind: inspect.Type) -> st.SearchStrategy[Any]:  # noqa: C901 - a case a type
    match kind:
        case inspect.UnionType(types=types):
            return st.one_of([_values(one) for one in types])
        case inspect.StructType(cls=cls):
            return st.deferred(lambda: messages(cls))
        case inspect.ListType(item_type=item, max_length=longest):
            return st.lists(_values(item), max_size=min(MAX_ITEMS, longest or MAX_ITEMS))
        case inspect.VarTupleType(item_type=item, max_length=longest):
            return st.lists(_values(item), max_size=min(MAX_ITEMS, longest or MAX_ITEMS)).map(tuple)
        case inspect.DictType(key_type=key, value_type=value):
            return st.dictionaries(_values(key), _values(value), max_size=MAX_ITEMS)
        case inspect.EnumType(cls=cls):
            return st.sampled_from(list(cls))
        case inspect.StrType(max_length=longest):
            return st.one_of(st.sampled_from(TEXTS), st.text(max_size=min(8, longest or 8)))
        case inspect.BytesType():
            return st.binary(max_size=8)
        case inspect.BoolType():
            return st.booleans()
        case inspect.NoneType():
            return st.none()
        case inspect.IntType(ge=least, le=most):
            low, high = -(2**63) if least is None else least, 2**63 - 1 if most is None else most
            return st.one_of(st.integers(max(low, 0), min(high, 6)), st.sampled_from([low, high, min(high, 2**31)]))
        case inspect.FloatType(ge=least, le=most):
            bounds = [-math.inf if least is None else least, math.inf if most is None else most]
            odd = [*bounds, *([math.nan] if most is None else [])]
            return st.one_of(st.floats(max(bounds[0], 0.0), min(bounds[1], 30.0)), st.sampled_from(odd))
    raise NotImplementedError(kind)
