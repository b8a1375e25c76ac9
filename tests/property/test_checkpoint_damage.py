"""Whatever happens to a checkpoint's bytes is noticed before anything of it is used."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ddpcore.checkpoint.formats import (
    MalformedHeaderError,
    MalformedManifestError,
    decode_header,
    decode_manifest,
    encode_header,
    lay_out,
)
from ddpcore.checkpoint.reading import verify
from ddpcore.checkpoint.tensor_files import read_checkpoint
from ddpcore.errors import CheckpointInvalidError
from tests.support.checkpoint_copies import commit, write_checkpoint

if TYPE_CHECKING:
    from pathlib import Path

NUM_RANKS = 3

relaxed = settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    state = {
        "model": {"large": torch.randn(120, 500), "small": torch.randn(7, dtype=torch.bfloat16)},
        "step": 3,
        "nan": float("nan"),
    }
    return write_checkpoint(tmp_path_factory.mktemp("sound"), state, NUM_RANKS, per_rank={"rng": torch.arange(9)})


@pytest.fixture
def copy(sound: Path, tmp_path: Path) -> Path:
    shutil.copytree(sound, tmp_path / sound.name, dirs_exist_ok=True)
    return tmp_path / sound.name


def assert_noticed(path: Path) -> str:
    with pytest.raises(CheckpointInvalidError) as noticed:
        verify(path)
    with pytest.raises(CheckpointInvalidError):
        read_checkpoint(path, 1)
    return str(noticed.value)


def test_an_untouched_checkpoint_is_sound(copy: Path) -> None:
    assert verify(copy).world_size == NUM_RANKS
    assert sorted(path.name for path in copy.iterdir()) == [
        "COMMITTED",
        "manifest.json",
        "rank-00000.safetensors",
        "rank-00001.safetensors",
        "rank-00002.safetensors",
    ]


@relaxed
@given(st.data())
def test_a_byte_that_differs_anywhere_in_any_file_is_noticed(copy: Path, data: st.DataObject) -> None:
    path = data.draw(st.sampled_from(sorted(copy.iterdir())))
    content = path.read_bytes()
    # Half of them where the structure is: headers and manifests are short.
    where = data.draw(st.one_of(st.integers(0, min(400, len(content) - 1)), st.integers(0, len(content) - 1)))
    flipped = content[where] ^ data.draw(st.integers(1, 255))
    path.write_bytes(content[:where] + bytes([flipped]) + content[where + 1 :])
    try:
        assert_noticed(copy)
    finally:
        path.write_bytes(content)


@relaxed
@given(st.data())
def test_a_file_that_is_cut_short_or_too_long_is_noticed(copy: Path, data: st.DataObject) -> None:
    path = data.draw(st.sampled_from(sorted(copy.iterdir())))
    content = path.read_bytes()
    path.write_bytes(
        data.draw(st.sampled_from([content + b"\n", content[: data.draw(st.integers(0, len(content) - 1))]]))
    )
    try:
        assert_noticed(copy)
    finally:
        path.write_bytes(content)


@pytest.mark.parametrize("number", range(5))
def test_a_file_that_is_missing_or_no_file_is_named(copy: Path, number: int) -> None:
    path = sorted(copy.iterdir())[number]
    path.unlink()

    assert path.name in assert_noticed(copy)

    path.mkdir()
    assert path.name in assert_noticed(copy)


def test_files_of_two_checkpoints_do_not_make_one(copy: Path, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    other = write_checkpoint(tmp_path / "other", {"model": torch.zeros(3)}, NUM_RANKS)
    shutil.copy(other / "manifest.json", copy)

    assert "manifest.json is damaged, or not its own: its checksum differs" in assert_noticed(copy)


def hostile(path: Path, change: Any) -> None:
    """Change a manifest and commit it: a checksum does not tell who wrote it."""
    manifest = json.loads((path / "manifest.json").read_bytes())
    change(manifest)
    raw = json.dumps(manifest).encode()
    (path / "manifest.json").write_bytes(raw)
    commit(path)


HUGE = {"dtype": "F32", "shape": [10**9, 10**9], "pieces": [["rank-00000.safetensors", 0, 10**9]]}

HOSTILE = {
    "a file elsewhere": lambda it: it["files"].update({"../../etc/passwd": {"bytes": 1, "checksum": "0" * 8}}),
    "an absolute file": lambda it: it["files"].update({"/etc/passwd": {"bytes": 1, "checksum": "0" * 8}}),
    "a piece elsewhere": lambda it: it["tensors"]["model.small"].update(pieces=[["/etc/passwd", 0, 7]]),
    "a tensor larger than the disk": lambda it: it["tensors"].update(huge=HUGE),
    "a tensor nobody has": lambda it: it["tensors"].update(
        extra={**HUGE, "shape": [], "pieces": [["rank-00000.safetensors", 0, 1]]}
    ),
    "a negative size": lambda it: it["tensors"]["model.small"].update(shape=[-7]),
    "a tensor of a zillion dimensions": lambda it: it["tensors"]["model.small"].update(shape=[1] * 10_000 + [7]),
    "an empty tensor that overflows": lambda it: it["tensors"].update(
        extra={"dtype": "U8", "shape": [0, 2**40, 2**40], "pieces": [["rank-00000.safetensors", 0, 0]]}
    ),
    "an unknown dtype": lambda it: it["tensors"]["model.small"].update(dtype="object"),
    "rows that overlap": lambda it: it["tensors"]["model.large"]["pieces"][1].__setitem__(1, 0),
    "no ranks": lambda it: it.update(ranks=[], files={}, tensors={}),
    "ranks outside of the world": lambda it: it.update(world_size=2),
    "a state of an unknown tensor": lambda it: it.update(state={"$": "tensor", "name": "nobody"}),
    "a state that is a reserved word": lambda it: it.update(state={"$": "exec", "code": "boom"}),
    "an unknown field": lambda it: it.update(extra=1),
    "a step as text": lambda it: it.update(step="0"),
    "another step": lambda it: it.update(step=5),
    "another format": lambda it: it.update(format="rankdeck-checkpoint/99"),
}


@pytest.mark.parametrize("change", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_hostile_manifest_with_the_right_checksum_is_refused(copy: Path, change: Any) -> None:
    hostile(copy, change)

    with pytest.raises(CheckpointInvalidError):
        read_checkpoint(copy, 0)


def test_a_state_nested_without_end_is_refused(copy: Path) -> None:
    hostile(copy, lambda it: it.update(state="HERE"))
    manifest = (copy / "manifest.json").read_text().replace('"HERE"', "[" * 100_000 + "]" * 100_000)
    (copy / "manifest.json").write_text(manifest)
    commit(copy)

    assert "nested too deep" in assert_noticed(copy)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda it: st.lists(it, max_size=4) | st.dictionaries(st.text(max_size=5), it, max_size=4),
)


@given(st.binary() | json_values.map(lambda value: json.dumps(value).encode()), st.integers(0, 1000))
def test_any_bytes_are_a_header_or_refused(raw: bytes, data_bytes: int) -> None:
    try:
        decode_header(raw, data_bytes)
    except MalformedHeaderError:
        return


@given(st.data())
def test_a_manifest_with_any_part_replaced_is_sound_or_refused(sound: Path, data: st.DataObject) -> None:
    manifest = json.loads((sound / "manifest.json").read_bytes())
    part = manifest
    while isinstance(part, dict | list) and part:
        key = data.draw(st.sampled_from(list(part) if isinstance(part, dict) else range(len(part))))
        if data.draw(st.booleans()) or not isinstance(part[key], dict | list) or not part[key]:
            part[key] = data.draw(json_values)
            break
        part = part[key]
    try:
        decode_manifest(json.dumps(manifest).encode())
    except MalformedManifestError:
        return


def test_a_header_holds_what_was_put_into_it() -> None:
    entries = lay_out([])
    raw = encode_header(entries, {"format": "pt"})

    assert decode_header(raw[8:], 0) == ([], {"format": "pt"})
    assert len(raw) % 64 == 0
