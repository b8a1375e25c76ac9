"""A training's state as named tensors and a JSON text, and back, bit for bit: pure.

The state is a tree of dicts, lists and tuples. Its leaves are tensors, numbers, texts, booleans and None. What JSON
has, it keeps; the rest is an object with one reserved key:

    {"$": "tensor", "name": "model.weight"}    {"$": "tuple", "items": [...]}    {"$": "float", "bits": "7ff0..."}
    {"$": "dict", "items": [[key, value], ...]}, "ordered" and "counter" alike: for keys that are no texts, and for
    `OrderedDict` (with the `_metadata` of a module's state_dict) and `Counter` (a schedule's milestones)

A tensor that stands in several places (tied weights) is stored once, and is one tensor again, unless it is sharded.
"""

from __future__ import annotations

import math
import struct
from collections import Counter, OrderedDict
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

import torch
from torch import Tensor, nn

from ddpcore.checkpoint.formats import METADATA, Spec
from ddpcore.checkpoint.restoring import is_sharded, problem_of
from ddpcore.errors import StateNotStorableError

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Mapping

DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "U16": torch.uint16,
    "I16": torch.int16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "F32": torch.float32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F64": torch.float64,
    "C64": torch.complex64,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

MAX_DEPTH = 100
MAX_INT_BITS = 8192
"""Python reads no longer numbers from a text, unless its limit is raised."""

_TAG = "$"
_PLAIN_TENSORS = (Tensor, nn.Parameter, nn.Buffer)
_SCALARS = (str, int, float, bool, type(None))
_DICT_TAGS: dict[type, str] = {dict: "dict", OrderedDict: "ordered", Counter: "counter"}
_HINTS = {
    "bytes": "make it a torch.uint8 tensor",
    "ndarray": "make it a tensor with torch.from_numpy",
    "ShardedTensor": "shard with torch.distributed.tensor instead, as torch.distributed.fsdp.fully_shard does",
    "Size": "make it a tuple",
    "device": "make it a str",
    "dtype": "make it a str",
    "set": "make it a list",
}


class MalformedStateError(ValueError):
    """A JSON value describes no state, or not one of these tensors."""


class FlatState(NamedTuple):
    """A state taken apart.

    `skeleton` is everything but the tensors, as JSON. `tensors` are in the order of the state, each once. `listing` is
    what stands in each place, without numbers, and which places have one tensor: it is alike on ranks that save one
    state.
    """

    skeleton: object
    tensors: dict[str, Tensor]
    listing: dict[str, str]

    def specs(self) -> list[Spec]:
        """Return the tensors without their bytes."""
        return [spec_of(name, tensor) for name, tensor in self.tensors.items()]


def spec_of(name: str, tensor: Tensor) -> Spec:
    """Return a tensor's dtype and shape."""
    return Spec(name, DTYPE_NAMES[tensor.dtype], tuple(tensor.shape))


def flatten(state: object, root: str = "state", taken: Container[str] = ()) -> FlatState:
    """Take a state apart. Copies nothing.

    `root` is what messages call it, `taken` are names that tensors must not get. Raises StateNotStorableError with the
    place of a part that cannot be stored.
    """
    walk = _Walk(root, taken)
    return FlatState(walk.encode(state, (), 0), walk.tensors, walk.listing)


def unflatten(skeleton: object, tensors: Mapping[str, Tensor]) -> Any:
    """Put a state together; raise MalformedStateError if the skeleton is none, or names tensors that are missing."""
    return _decode(skeleton, tensors, 0)


def select(skeleton: object, keys: Container[str]) -> object:
    """Return a state's skeleton with these of its keys alone; one that is no dict of texts stays as it is."""
    if not isinstance(skeleton, dict) or _TAG in skeleton:
        return skeleton
    return {key: value for key, value in skeleton.items() if key in keys}


def keys_of(skeleton: object) -> list[str]:
    """Return the keys of a state by its skeleton; none of one that is no dict of texts."""
    return list(skeleton) if isinstance(skeleton, dict) and _TAG not in skeleton else []


def places(skeleton: object) -> dict[str, str]:
    """Return the name under which each tensor of a state is stored, by its place: the keys to it, joined by dots.

    A tensor that stands in several places has them all. Of places that are written alike the first counts. Raises
    MalformedStateError if the skeleton is nested too deep.
    """
    found: dict[str, str] = {}
    queue: list[tuple[tuple[object, ...], object]] = [((), skeleton)]
    while queue:
        path, node = queue.pop()
        if len(path) > MAX_DEPTH:
            raise MalformedStateError(f"its state is nested deeper than {MAX_DEPTH}")
        match node:
            case {"$": "tensor", "name": str(name)}:
                found.setdefault(".".join(map(str, path)), name)
            case {"$": str(tag), "items": list(items)} if tag in _DICT_TAGS.values():
                queue += [((*path, item[0]), item[1]) for item in reversed(items) if _is_pair(item)]
            case {"$": "tuple", "items": list(items)}:
                queue += [((*path, number), item) for number, item in reversed([*enumerate(items)])]
            case list():
                queue += [((*path, number), item) for number, item in reversed([*enumerate(node)])]
            case dict() if _TAG not in node:
                queue += [((*path, key), item) for key, item in reversed(node.items())]
    return found


def stored_names(skeleton: object) -> set[str]:
    """Return the names of all tensors of a state, those of places that are written alike among them."""
    found, queue = set(), [skeleton]
    while queue:
        match queue.pop():
            case {"$": "tensor", "name": str(name)}:
                found.add(name)
            case dict() as node:
                queue += node.values()
            case list() as items:
                queue += items
    return found


def _is_pair(item: object) -> TypeGuard[list[object]]:
    return isinstance(item, list) and len(item) == 2 and not isinstance(item[0], dict | list)


class _Walk:
    """One pass over a state."""

    def __init__(self, root: str, taken: Container[str]) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.listing: dict[str, str] = {}
        self._root = root
        self._taken = taken
        self._name_of: dict[tuple[object, ...], str] = {}

    def encode(self, node: object, path: tuple[object, ...], depth: int) -> object:
        """Return a node as JSON has it."""
        kind = type(node)
        if depth > MAX_DEPTH:
            raise self._refusal(path, f"lies more than {MAX_DEPTH} levels deep: does the state contain itself?")
        if isinstance(node, Tensor):
            return self._encode_tensor(node, path)
        if kind in _SCALARS:
            self.listing[self._place(path)] = "a value"
            return self._encode_scalar(node, path)
        if kind in (list, tuple):
            self.listing[self._place(path)] = f"a {kind.__name__}"
            items = [self.encode(item, (*path, number), depth + 1) for number, item in enumerate(node)]  # type: ignore[arg-type, var-annotated]
            return items if kind is list else {_TAG: "tuple", "items": items}
        if isinstance(node, dict) and kind in _DICT_TAGS:
            self.listing[self._place(path)] = "a dict"
            return self._encode_dict(node, path, depth)
        fallback = "keep tensors, numbers, texts, booleans, None, and dicts, lists, tuples of them"
        hint = "make it a Python number" if isinstance(node, float | int) else _HINTS.get(kind.__name__, fallback)
        raise self._refusal(path, f"is a {kind.__module__}.{kind.__qualname__}: {hint}")

    def _encode_scalar(self, node: object, path: tuple[object, ...]) -> object:
        if type(node) is float and not math.isfinite(node):
            return {_TAG: "float", "bits": struct.pack(">d", node).hex()}
        if type(node) is int and node.bit_length() > MAX_INT_BITS:
            raise self._refusal(path, f"is an integer of {node.bit_length()} bits: {MAX_INT_BITS} is the most")
        return node

    def _encode_dict(self, node: dict[Any, Any], path: tuple[object, ...], depth: int) -> object:
        for key in node:
            if type(key) not in _SCALARS:
                raise self._refusal(path, f"has the key {key!r}: keys are texts, numbers, booleans or None")
        values = [self.encode(value, (*path, key), depth + 1) for key, value in node.items()]
        tag = _DICT_TAGS[type(node)]
        if tag == "dict" and _TAG not in node and all(type(key) is str for key in node):
            return dict(zip(node, values, strict=True))
        keys = [self._encode_scalar(key, path) for key in node]
        encoded: dict[str, object] = {_TAG: tag, "items": [list(item) for item in zip(keys, values, strict=True)]}
        metadata = getattr(node, "_metadata", None)
        if metadata is not None:
            encoded["metadata"] = self.encode(metadata, (*path, "_metadata"), depth + 1)
        return encoded

    def _encode_tensor(self, tensor: Tensor, path: tuple[object, ...]) -> object:
        if is_sharded(tensor):
            if problem := problem_of(tensor):
                raise self._refusal(path, problem)
        elif type(tensor) not in _PLAIN_TENSORS:
            hint = _HINTS.get(type(tensor).__name__, "make it a plain tensor")
            raise self._refusal(path, f"is a {type(tensor).__name__}: {hint}")
        if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_quantized:
            what = "on the meta device" if tensor.is_meta else "sparse or quantized"
            raise self._refusal(path, f"is {what}: make it a plain tensor")
        if tensor.dtype not in DTYPE_NAMES:
            raise self._refusal(path, f"is {tensor.dtype}, which safetensors does not know: convert it")
        identity = _identity(tensor)
        name = self._name_of.get(identity)
        alias = "" if name is None else f" (the same tensor as {name})"
        if name is None:
            name = self._new_name(path)
            self._name_of[identity] = name
            self.tensors[name] = tensor
        spec = spec_of(name, tensor)
        self.listing[self._place(path)] = f"{spec.dtype} {list(spec.shape)}{alias}"
        return {_TAG: "tensor", "name": name}

    def _new_name(self, path: tuple[object, ...]) -> str:
        # What UTF-8 cannot hold, a safetensors header cannot either.
        plain = ".".join(map(str, path)).encode(errors="backslashreplace").decode() or self._root
        name, number = plain, 1
        while name in self.tensors or name in self._taken or name == METADATA:
            number += 1
            name = f"{plain}#{number}"
        return name

    def _place(self, path: tuple[object, ...]) -> str:
        return self._root + "".join(f"[{key!r}]" for key in path)

    def _refusal(self, path: tuple[object, ...], problem: str) -> StateNotStorableError:
        place = self._place(path)
        return StateNotStorableError(f"{place} {problem}", place)


def _identity(tensor: Tensor) -> tuple[object, ...]:
    """Return what two tensors have in common if one is as good as the other."""
    if tensor.numel() == 0 or is_sharded(tensor):
        # A rank may hold nothing of a sharded tensor, but must find the same ones equal as the others.
        return (id(tensor),)
    # A conjugate shares its memory with the tensor, but not its values.
    flags = (tensor.is_conj(), tensor.is_neg())
    return (tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride(), flags)


def _decode(node: object, tensors: Mapping[str, Tensor], depth: int) -> Any:
    if depth > MAX_DEPTH:
        raise MalformedStateError(f"its state is nested deeper than {MAX_DEPTH}")
    if isinstance(node, list):
        return [_decode(item, tensors, depth + 1) for item in node]
    if not isinstance(node, dict):
        return node
    if _TAG not in node:
        return {key: _decode(value, tensors, depth + 1) for key, value in node.items()}
    match node:
        case {"$": "tensor", "name": str(name)} if name in tensors:
            return tensors[name]
        case {"$": "float", "bits": str(bits)} if len(bits) == 16:
            return _float(bits)
        case {"$": "tuple", "items": list(items)}:
            return tuple(_decode(item, tensors, depth + 1) for item in items)
        case {"$": "dict" | "ordered" | "counter" as tag, "items": list(items)}:
            return _decode_dict(tag, items, node.get("metadata"), lambda value: _decode(value, tensors, depth + 1))
    raise MalformedStateError(f"its state makes no sense at {str(node)[:80]}")


def _decode_dict(tag: str, items: list[object], metadata: object, decode: Callable[[object], Any]) -> dict[Any, Any]:
    found: dict[Any, Any] = {"dict": dict, "ordered": OrderedDict, "counter": Counter}[tag]()
    for item in items:
        match item:
            case [key, value]:
                key = decode(key)
                if type(key) in _SCALARS and key not in found:
                    found[key] = decode(value)
                    continue
        raise MalformedStateError(f"its state has a dict that makes no sense at {str(item)[:80]}")
    if metadata is not None and tag == "ordered":
        found._metadata = decode(metadata)  # type: ignore[attr-defined] # noqa: SLF001 - torch keeps a module's version there
    return found


def _float(bits: str) -> float:
    try:
        return float(struct.unpack(">d", bytes.fromhex(bits))[0])
    except ValueError:
        raise MalformedStateError(f"its state has a number that is none: {bits}") from None
