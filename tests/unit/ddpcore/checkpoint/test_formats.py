"""The texts of a checkpoint's files, read strictly: each thing that can be wrong with them has its own words."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from ddpcore.checkpoint.formats import (
    CHECKSUM,
    MANIFEST_FORMAT,
    MalformedHeaderError,
    MalformedManifestError,
    Manifest,
    Piece,
    Spec,
    decode_header,
    decode_length,
    decode_manifest,
    encode_body,
    tensor_records,
)
from ddpcore.checkpoint.state_tree import MalformedStateError, unflatten

SOUND = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("header", "problem"),
    [
        ([1], "its header is no JSON object"),
        ({"__metadata__": {"a": 1}}, "its header's own texts are no texts"),
        ({"__metadata__": []}, "its header's own texts are no texts"),
        ({"a": {**SOUND, "dtype": "F31"}}, "its header makes no sense at 'a'"),
        ({"a": {**SOUND, "more": 1}}, "its header makes no sense at 'a'"),
        ({"a": {**SOUND, "shape": [-2]}}, "its header makes no sense at 'a'"),
        ({"a": {**SOUND, "shape": [3]}}, "its header makes no sense at 'a'"),
        ({"a": {**SOUND, "shape": [1] * 65}}, "its header makes no sense at 'a'"),
        ({"a": {**SOUND, "data_offsets": [8]}}, "its header makes no sense at 'a'"),
        ({"a": 3}, "its header makes no sense at 'a'"),
        ({"a": {**SOUND, "data_offsets": [8, 16]}}, "'a' does not begin where the tensor before it ends"),
        ({"a": SOUND, "b": SOUND}, "'b' does not begin where the tensor before it ends"),
        ({}, "its header speaks of 0 bytes, 8 follow"),
    ],
)
def test_a_header_that_makes_no_sense_says_why(header: Any, problem: str) -> None:
    assert decode_header(json.dumps({"a": SOUND}).encode(), 8)[0][0].spec == Spec("a", "F32", (2,))

    with pytest.raises(MalformedHeaderError) as refusal:
        decode_header(json.dumps(header).encode(), 8)

    assert str(refusal.value) == problem


@pytest.mark.parametrize("raw", [b"", b"\0" * 7, b"\xff" * 8, (93).to_bytes(8, "little")])
def test_a_header_longer_than_its_file_is_none(raw: bytes) -> None:
    with pytest.raises(MalformedHeaderError, match="its header would be"):
        decode_length(raw, 100)


def manifest_text(**changes: Any) -> bytes:
    manifest = Manifest(
        files={},
        format=MANIFEST_FORMAT,
        checksum=CHECKSUM,
        step=7,
        sequence=3,
        id="run.3",
        world_size=2,
        ranks=(0, 1),
        torch="2",
        saved_at="now",
        tensors=tensor_records([Spec("a", "F32", (4, 2))], {0: [Piece("a", 0, 3)], 1: [Piece("a", 3, 4)]}),
        state=1 << 100,
    )
    files = {f"rank-0000{rank}.safetensors": {"bytes": 100, "checksum": "01234567"} for rank in (0, 1)}
    return json.dumps({"files": files, **json.loads(encode_body(manifest)), **changes}).encode()


def piece(file: int, begin: int, end: int) -> list[Any]:
    return [f"rank-0000{file}.safetensors", begin, end]


@pytest.mark.parametrize(
    ("pieces", "problem"),
    [
        ([], "its manifest has only a part of tensor 'a'"),
        ([piece(0, 0, 3)], "its manifest has only a part of tensor 'a'"),
        ([piece(0, 0, 3), piece(0, 3, 4)], "its manifest has tensor 'a' in pieces that do not fit"),
        ([piece(0, 0, 3), piece(1, 2, 4)], "its manifest has tensor 'a' in pieces that do not fit"),
        ([piece(0, 0, 5), piece(1, 5, 4)], "its manifest has tensor 'a' in pieces that do not fit"),
        ([piece(7, 0, 4)], "its manifest has tensor 'a' in pieces that do not fit"),
    ],
)
def test_pieces_that_do_not_make_the_tensor_are_refused(pieces: list[Any], problem: str) -> None:
    assert decode_manifest(manifest_text()).state == 1 << 100

    tensors = {"a": {"dtype": "F32", "shape": [4, 2], "pieces": pieces}}
    with pytest.raises(MalformedManifestError) as refusal:
        decode_manifest(manifest_text(tensors=tensors))

    assert str(refusal.value) == problem


@pytest.mark.parametrize(
    ("raw", "problem"),
    [
        (b"{", "its manifest makes no sense"),
        (b"\xff", "its manifest makes no sense"),
        (manifest_text().replace(b'"step": 7', b'"step": 7, "step": 7'), "a key stands twice in one object"),
        (manifest_text().replace(b'"step": 7', b'"step": NaN'), "NaN is no JSON"),
        (manifest_text().replace(b'"step": 7', b'"step": 7.5'), "Expected `int`"),
        (b"[" * 100_000, "nested too deep"),
    ],
)
def test_what_is_no_strict_json_is_no_manifest(raw: bytes, problem: str) -> None:
    with pytest.raises(MalformedManifestError, match=problem):
        decode_manifest(raw)


@pytest.mark.parametrize(
    ("skeleton", "problem"),
    [
        ({"$": "float", "bits": "x" * 16}, "its state has a number that is none"),
        ({"$": "dict", "items": [[1]]}, "its state has a dict that makes no sense"),
        ({"$": "dict", "items": [[1, 2], [1, 3]]}, "its state has a dict that makes no sense"),
        ({"$": "dict", "items": [[[1], 2]]}, "its state has a dict that makes no sense"),
        ({"$": "nothing"}, "its state makes no sense"),
    ],
)
def test_a_skeleton_that_makes_no_sense_says_why(skeleton: Any, problem: str) -> None:
    with pytest.raises(MalformedStateError, match=problem):
        unflatten(skeleton, {})


def test_a_skeleton_deeper_than_any_state_is_refused() -> None:
    skeleton: Any = 1
    for _ in range(200):
        skeleton = [skeleton]

    with pytest.raises(MalformedStateError, match="nested deeper than 100"):
        unflatten(skeleton, {"a": torch.zeros(1)})
