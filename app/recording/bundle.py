"""The evidence of one moment as files of a zip: texts for users, data for programs, a recording for the console.

Pure: what is collected comes in as values. The recording holds all of it; the texts are for readers without rankdeck.

`masked` and `masked_values` remove what looks like a secret from records before they are kept.
"""

from __future__ import annotations

import io
import lzma
import struct
import zipfile
import zlib
from typing import TYPE_CHECKING, Any

import msgspec

from agent.wire.codec import MalformedMessageError
from agent.wire.digest import decode_frame, encode_frame
from agent.wire.reports import MAX_NODE_REPORT_BYTES, NodeReport, head_of
from agent.wire.secret_mask import masked_text, may_hold_secret
from agent.wire.stacks import Stacks
from app.diagnosis.rank_facts import Thresholds
from app.recording.playback import Playback, answer_of, clock_text, timeline
from app.recording.records import (
    MAX_RECORDING_BYTES,
    LinesRecord,
    MalformedRecordingError,
    NoticeRecord,
    Opening,
    Record,
    Recording,
    ReportRecord,
    StacksRecord,
    encode_recording,
)
from app.stacks.groups import NodeStacks, picture_of, stacks_object
from app.stacks.stack_text import picture_lines, summary_text
from app.text import LINE_LIMIT, clean, clean_name, ranks_text, seconds_text

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from app.stacks.groups import StackPicture

RECORDING_NAME = "recording.rankdeck"
_FIRST_BYTES_OF_A_ZIP = b"PK\x03\x04"
_ZIP_ERRORS = (
    *(zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError, OSError, ValueError),
    *(zlib.error, lzma.LZMAError),
)
_LOCAL_HEADER = struct.Struct("<8xH16xHH")
"""Header of a member: method, length of its name, length of what follows that."""
_CONTENTS = f"""
status.json          how nodes, ranks, waits and verdicts stood at the end
stacks.txt, .json    where every rank stood, down to each frame, with its flight recorder and its versions
logs/NODE.log        what the ranks printed last
jobs/NODE.json       what the node was to run
{RECORDING_NAME}   all that was received before and after, for `rankdeck replay`, which also takes the whole zip

What looks like a secret is masked: by its name in environments and commands, by its form everywhere else. Look through
the logs all the same before you pass this on."""


class Evidence(msgspec.Struct, frozen=True):
    """Collected evidence, masked."""

    opening: Opening
    records: list[Record]
    """Records with times relative to the first."""
    status: dict[str, Any]
    """Status at the end, as `--json` prints it."""
    summary: list[str]
    """Status at the end as lines of text."""
    jobs: dict[str, Any]
    """Job that each node was asked to run, or why that is not known."""
    thresholds: Thresholds = Thresholds()
    """Thresholds by which the timeline is judged."""


def bundle_name(opening: Opening) -> str:
    """Return `train-20261121-031245.zip`."""
    stamp = "".join(character for character in opening.made_at if character.isdigit())
    return f"{opening.job_id or 'cluster'}-{stamp[:8]}-{stamp[8:]}.zip"


def encode_bundle(evidence: Evidence) -> bytes:
    """Return the content of the zip."""
    directory = bundle_name(evidence.opening).removesuffix(".zip")
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as bundle:
        # First, and not packed again: so it can be read from a zip whose end is missing.
        packed = encode_recording(evidence.opening, evidence.records)
        bundle.writestr(f"{directory}/{RECORDING_NAME}", packed, zipfile.ZIP_STORED)
        for name, text in _texts(evidence).items():
            bundle.writestr(f"{directory}/{name}", text)
    return content.getvalue()


def recording_of(content: bytes) -> bytes:
    """Return the recording in a file, which is a bundle or the recording itself; hostile.

    A bundle whose end is missing is read as far as it goes.

    Raises:
        MalformedRecordingError: It is a broken zip, or one without a recording.
    """
    if not content.startswith(_FIRST_BYTES_OF_A_ZIP):
        return content
    if (rest := _first_member(content)) is not None:
        return rest
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as bundle:
            for member in bundle.infolist():
                if member.filename.rpartition("/")[2] == RECORDING_NAME and member.file_size <= MAX_RECORDING_BYTES:
                    with bundle.open(member) as file:
                        return file.read(MAX_RECORDING_BYTES)
    except _ZIP_ERRORS as error:
        raise MalformedRecordingError(f"it is a zip that cannot be read: {error}") from None
    raise MalformedRecordingError(f"it is a zip without a {RECORDING_NAME}")


def _first_member(content: bytes) -> bytes | None:
    """Return a bundle from the first byte of its recording on, None where that is not its first member.

    Source: APPNOTE.TXT 4.3.7. What follows the recording does not matter: its own end is marked.
    """
    if len(content) < _LOCAL_HEADER.size:
        return None
    method, name_size, extra_size = _LOCAL_HEADER.unpack_from(content)
    end = _LOCAL_HEADER.size + name_size
    is_ours = content[_LOCAL_HEADER.size : end].endswith(f"/{RECORDING_NAME}".encode())
    return content[end + extra_size :] if is_ours and method == zipfile.ZIP_STORED else None


def latest_stacks(records: Sequence[Record]) -> list[NodeStacks]:
    """Return the stacks of the last moment at which some were taken, preferring one with frames."""
    taken = [record for record in records if isinstance(record, StacksRecord)]
    with_frames = [one for one in taken if one.stacks and any(rank.threads for rank in one.stacks.ranks)]
    at_s = next((one.at_s for one in reversed(with_frames or taken)), 0.0)
    return [answer_of(one) for one in taken if one.at_s == at_s]


def _texts(evidence: Evidence) -> dict[str, bytes]:
    files = {"about.txt": _about(evidence), "status.json": _json(evidence.status)}
    if stacks := latest_stacks(evidence.records):
        picture = picture_of(stacks)
        lines = [summary_text(picture), "", *(line.text for line in picture_lines(picture, is_whole=True))]
        files |= {"stacks.txt": "\n".join(lines) + "\n", "stacks.json": _json(stacks_object(picture))}
    for node, lines in _printed(evidence.records, evidence.opening.job_id).items():
        files[f"logs/{file_name(node)}.log"] = "\n".join(lines) + "\n"
    for node, job in evidence.jobs.items():
        files[f"jobs/{file_name(node)}.json"] = _json(job)
    return {name: text.encode() for name, text in files.items()}


def _about(evidence: Evidence) -> str:
    opening = evidence.opening
    begun_s = evidence.records[-1].at_s if evidence.records else 0.0
    nodes = ", ".join(opening.nodes) or "no node"
    return "\n".join(
        (
            f"Evidence of job {opening.job_id or '(none)'}, collected by rankdeck {opening.rankdeck_version}",
            f"at {opening.made_at}, of the {seconds_text(begun_s)} up to then, on {nodes}.",
            f"Why: {opening.why}" if opening.why else "",
            *_fault_lines(evidence.jobs),
            "",
            *_timeline_lines(evidence),
            "At the end:",
            *evidence.summary,
            "",
            *_version_lines(picture_of(latest_stacks(evidence.records))),
            _CONTENTS,
            "",
        )
    )


def _fault_lines(jobs: Mapping[str, Any]) -> list[str]:
    """Return the faults that the job was started with: they explain what follows."""
    faults = [fault for job in jobs.values() for fault in job.get("spec", {}).get("faults", ())]
    asked = dict.fromkeys(f"{fault['kind']} rank {fault['rank']} at step {fault.get('at_step')}" for fault in faults)
    return [f"rankdeck was asked to do this harm: {', '.join(asked)}"] if asked else []


def _timeline_lines(evidence: Evidence) -> list[str]:
    """Return the verdicts by time of day and by time before the end."""
    recording = Recording(evidence.opening, evidence.records, is_cut=False)
    entries = [
        f"{clock_text(recording, at_s)} ({seconds_text(recording.length_s - at_s)} before the end)  {text}"
        for at_s, text in timeline(Playback(recording, evidence.thresholds))
    ]
    return ["Messages, as it began:", *entries, ""] if entries else []


def _version_lines(picture: StackPicture) -> list[str]:
    """Return the versions of all ranks, those that differ on lines of their own."""
    ranks: dict[str, list[int]] = {}
    for row in picture.ranks:
        versions_text = ", ".join(f"{name} {version}" for name, version in row.versions.items())
        ranks.setdefault(versions_text or "not known", []).append(row.rank)
    return [f"versions on {ranks_text(sorted(some))}: {versions_text}" for versions_text, some in ranks.items()]


def _printed(records: Sequence[Record], job_id: str) -> Mapping[str, list[str]]:
    """Return what the ranks of the job, or of all where none is named, have printed, by node."""
    printed: dict[str, list[str]] = {}
    for record in records:
        if isinstance(record, LinesRecord):
            lines = printed.setdefault(record.node, [])
            for line in record.lines:
                if job_id and line.job_id not in ("", job_id):
                    continue
                who = f"rank {line.rank}" if line.rank >= 0 else "launcher"
                lines.append(f"[{who} {clean_name(line.stream)}] {clean(line.text, LINE_LIMIT)}")
    return printed


def file_name(node: str) -> str:
    """Return a safe file name for any node name."""
    return "".join(one if one.isascii() and (one.isalnum() or one in "-_.") else "_" for one in node)[:100] or "node"


def _json(value: object) -> str:
    return msgspec.json.format(msgspec.json.encode(value), indent=2).decode() + "\n"


def masked(record: Record) -> Record:
    """Return a record that may be passed on."""
    match record:
        case ReportRecord(frame=frame):
            return msgspec.structs.replace(record, frame=_masked_frame(frame))
        case LinesRecord(lines=lines):
            shown = [msgspec.structs.replace(line, text=masked_values(line.text)) for line in lines]
            return msgspec.structs.replace(record, lines=shown)
        case StacksRecord(stacks=stacks) if stacks is not None:
            masked_stacks = msgspec.convert(masked_values(msgspec.to_builtins(stacks)), Stacks)
            return msgspec.structs.replace(record, stacks=masked_stacks)
        case NoticeRecord(text=text):
            return msgspec.structs.replace(record, text=masked_values(text))
    return record


def _masked_frame(frame: bytes) -> bytes:
    if not may_hold_secret(frame):
        return frame  # nearly all: only tracebacks and the like hold text of a program
    try:
        found = decode_frame(frame)
        # Workers that cannot be read and fields of other versions may hold secrets, too: they are left out.
        report = NodeReport(**head_of(found), workers=list(found.workers))
        frame = encode_frame(msgspec.convert(masked_values(msgspec.to_builtins(report)), NodeReport))
    except (MalformedMessageError, msgspec.ValidationError):
        return b""  # nothing could be shown of it
    return frame if len(frame) <= MAX_NODE_REPORT_BYTES else b""


def masked_values(value: Any) -> Any:
    """Return built-in values with every string masked, but for a job's name: another one would be another job's."""
    if isinstance(value, str):
        return masked_text(value)[: len(value)]  # no length limit that the text meets may be exceeded
    if isinstance(value, list):
        return [masked_values(one) for one in value]
    if isinstance(value, dict):
        return {name: one if name == "job_id" else masked_values(one) for name, one in value.items()}
    return value
