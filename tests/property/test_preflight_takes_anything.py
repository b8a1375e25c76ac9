"""Whatever hosts say of themselves and of each other, it is told in printable lines, and nothing raises."""

from __future__ import annotations

import json

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.wire.codec import MalformedMessageError
from agent.wire.examination import (
    Clock,
    Code,
    Examination,
    Facts,
    FileDigest,
    Health,
    Interface,
    Listening,
    Reached,
    ReachReport,
    Row,
    decode_clock,
    decode_examination,
    decode_listening,
    decode_reach_report,
)
from app.cli.agents import json_object
from app.preflight.comparison import compare
from app.preflight.findings import Answers, ClockDifference, Wanted, cleaned
from app.preflight.mesh import routes
from app.preflight.report_lines import report_lines
from app.text import clean
from tests.support.examples import few_and_many

HOSTS = ["h1", "h2", "h3"]
words = st.sampled_from(["", "a", "b", "\x1b[2J", "\u202e", "127.0.0.1", "10.0.0.1", "fd00::1", "{usual}", "%s"])
texts = words | st.text(max_size=64)
codes = st.builds(
    Code,
    workdir=texts,
    commit=texts,
    num_changed=st.integers(0, 3),
    digest=texts,
    files=st.lists(st.builds(FileDigest, path=texts, digest=words), max_size=4),
)
facts = st.builds(
    Facts,
    hostname=words,
    rankdeck=words,
    python=words,
    torch=texts,
    cuda=words,
    nccl=words,
    driver=words,
    gpus=st.lists(texts, max_size=4),
    address=words,
    interfaces=st.lists(st.builds(Interface, name=words, address=words, mtu=st.integers(0, 2**63 - 1)), max_size=3),
    code=st.none() | codes,
)
rows = st.builds(Row, name=texts, status=st.sampled_from(Health), detail=texts, todo=texts)
examinations = st.builds(Examination, schema=st.just(1), rows=st.lists(rows, max_size=4), facts=facts)
listening = st.builds(
    Listening,
    schema=st.just(1),
    address=words,
    port=st.integers(0, 65_535),
    token=words,
    error=st.just("") | texts,
)
reached = st.builds(Reached, target=words, token=words, connect_s=st.floats(0, 1e10), interface=words, error=texts)
clocks = st.builds(ClockDifference, offset_s=st.floats(-2e11, 2e11), uncertainty_s=st.floats(0, 1e10))


@st.composite
def asked(draw: st.DrawFn) -> list[Answers]:
    hosts = []
    for host, others in routes(HOSTS).items():
        heard = draw(st.none() | examinations)
        listens = draw(listening)
        hosts.append(
            Answers(
                wanted=Wanted(host, draw(st.none() | st.integers(1, 8))),
                examination=None if heard is None else cleaned(decode_examination(msgspec.json.encode(heard))),
                clock=draw(st.none() | clocks),
                listening=cleaned(decode_listening(msgspec.json.encode(listens))),
                reached=draw(st.none() | st.fixed_dictionaries({other: reached.map(cleaned) for other in others})),
                reach_error=draw(st.sampled_from(["", "the connection broke"])),
            )
        )
    return hosts


def is_safe(text: str) -> bool:
    return clean(text, len(text) + 1) == text


@few_and_many(30, 80, asked(), st.integers(1, 200), st.booleans())
def test_whatever_hosts_say_is_told_in_lines_that_are_safe(hosts: list[Answers], width: int, shows_all: bool) -> None:
    found = compare(hosts)

    for line in report_lines(found, width, shows_all=shows_all):
        assert is_safe("".join(piece.text for piece in line))
    assert all(map(is_safe, found.problems))
    assert int(found.exit_code) == json.loads(json.dumps(json_object(found)))["exit_code"]


@settings(max_examples=300, deadline=None)
@given(
    st.binary(max_size=64)
    | st.sampled_from([b"[" * 10_000, b'{"schema":2}', b'{"schema":1,"rows":[]}', b"null", b'{"wall_time_s":1e999}'])
    | st.from_type(dict[str, int]).map(msgspec.json.encode)
)
def test_what_is_no_answer_is_refused(line: bytes) -> None:
    for decode in (decode_examination, decode_listening, decode_reach_report, decode_clock):
        try:
            answer = decode(line)
        except MalformedMessageError:
            continue
        assert isinstance(answer, Examination | Listening | ReachReport | Clock)
