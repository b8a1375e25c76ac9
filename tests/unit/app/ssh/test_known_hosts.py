"""Whether a host is who it was."""

from __future__ import annotations

import base64
import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.ssh.known_hosts import KnownHosts, Verdict, entry_line, fingerprint, kind_text, parse, parse_revoked

if TYPE_CHECKING:
    from pathlib import Path

KEY, OTHER = b"key-one", b"key-two"
ED = "ssh-ed25519"


def b64(key: bytes) -> str:
    return base64.b64encode(key).decode()


def known(*lines: str) -> KnownHosts:
    return KnownHosts(parse("\n".join(lines), "known_hosts"))


def hidden(name: str) -> str:
    """Return a name as HashKnownHosts writes it."""
    return entry_line(name, ED, KEY, b"s" * 20).split()[0]


@pytest.mark.parametrize(
    ("names", "name"),
    [
        ("gpu1", "gpu1"),
        ("GPU1", "gpu1"),
        ("a,gpu1,b", "gpu1"),
        ("gpu?", "gpu1"),
        ("*.lab,!bad.lab", "good.lab"),
        ("[gpu1]:2222", "[gpu1]:2222"),
        ("10.0.0.1", "10.0.0.1"),
    ],
)
def test_a_host_is_found_by_its_names(names: str, name: str) -> None:
    assert known(f"{names} {ED} {b64(KEY)}").judge(name, ED, KEY) is Verdict.KNOWN


@pytest.mark.parametrize(
    ("names", "name"),
    [("gpu1", "gpu2"), ("*.lab,!bad.lab", "bad.lab"), ("gpu1", "[gpu1]:2222"), ("[a-z]pu1", "gpu1"), ("", "")],
)
def test_others_are_not(names: str, name: str) -> None:
    assert known(f"{names} {ED} {b64(KEY)}").judge(name, ED, KEY) is Verdict.UNKNOWN


def test_another_key_is_a_change_and_so_is_another_kind_of_key() -> None:
    hosts = known(f"gpu1 {ED} {b64(OTHER)}", f"gpu1 ssh-rsa {b64(OTHER)}")

    assert hosts.judge("gpu1", ED, KEY) is Verdict.CHANGED
    assert hosts.judge("gpu1", "ecdsa-sha2-nistp256", KEY) is Verdict.CHANGED
    assert hosts.kinds("gpu1") == [ED, "ssh-rsa"]


def test_one_right_line_among_others_is_enough() -> None:
    assert known(f"gpu1 {ED} {b64(OTHER)}", f"gpu1 {ED} {b64(KEY)}").judge("gpu1", ED, KEY) is Verdict.KNOWN


def test_a_revoked_key_is_refused_whatever_else_is_written() -> None:
    hosts = known(f"gpu1 {ED} {b64(KEY)}", f"@revoked * {ED} {b64(KEY)}")

    assert hosts.judge("gpu1", ED, KEY) is Verdict.REVOKED


def test_a_list_of_revoked_keys_is_for_every_host() -> None:
    revoked = parse_revoked(f"# words\n\n{ED} {b64(KEY)} a comment\n", "/r")
    hosts = KnownHosts([*parse(f"gpu1 {ED} {b64(KEY)}\ngpu1 {ED} {b64(OTHER)}", "/k"), *revoked])

    assert hosts.judge("gpu1", ED, KEY) is Verdict.REVOKED
    assert hosts.judge("[gpu2]:2222", ED, KEY) is Verdict.REVOKED
    assert hosts.judge("gpu1", ED, OTHER) is Verdict.KNOWN
    assert hosts.judge("gpu2", ED, OTHER) is Verdict.UNKNOWN


@pytest.mark.parametrize(
    ("text", "words"),
    [("SSHKRL\n\0\0\0", "list the keys as text"), ("\nwords", "line 2 is not"), (f"{ED} ***", "line 1 is not")],
)
def test_a_list_of_revoked_keys_that_cannot_be_read_is_an_error(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parse_revoked(text, "/r")


def test_an_authority_is_not_a_key_of_the_host() -> None:
    assert known(f"@cert-authority *.lab {ED} {b64(KEY)}").judge("a.lab", ED, KEY) is Verdict.UNKNOWN


def test_lines_that_cannot_be_read_do_not_hide_the_others() -> None:
    hosts = known(
        "# words",
        "",
        "gpu1",
        f"gpu1 {ED} ***",
        f"@new gpu1 {ED} {b64(OTHER)}",
        f"|1|x {ED} {b64(KEY)}",
        f"gpu1 {ED} {b64(KEY)}",
    )

    assert hosts.judge("gpu1", ED, KEY) is Verdict.KNOWN


def test_an_entry_knows_its_place() -> None:
    (entry,) = parse(f"\n\ngpu1 {ED} {b64(KEY)} a comment", "/k")

    assert entry.place == "/k:3"


@given(st.text())
def test_any_file_can_be_read(text: str) -> None:
    KnownHosts(parse(text, "k")).judge("gpu1", ED, KEY)


@pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="ssh-keygen is not installed")
def test_hashed_names_and_fingerprints_are_those_of_openssh(tmp_path: Path) -> None:
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / "k")], check=True)
    kind, text = (tmp_path / "k.pub").read_text().split()[:2]
    file = tmp_path / "known_hosts"
    file.write_text(f"gpu1 {kind} {text}\n[gpu2]:2222 {kind} {text}\n")
    subprocess.run(["ssh-keygen", "-q", "-H", "-f", str(file)], check=True, capture_output=True)
    printed = subprocess.run(["ssh-keygen", "-lf", str(tmp_path / "k.pub")], check=True, capture_output=True, text=True)
    key = base64.b64decode(text)

    hosts = KnownHosts(parse(file.read_text(), str(file)))

    assert "gpu1" not in file.read_text()
    assert hosts.judge("gpu1", kind, key) is Verdict.KNOWN
    assert hosts.judge("[gpu2]:2222", kind, key) is Verdict.KNOWN
    assert hosts.judge("gpu2", kind, key) is Verdict.UNKNOWN
    assert fingerprint(key) in printed.stdout


@pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="ssh-keygen is not installed")
@pytest.mark.parametrize("name", ["gpu1", "[gpu1]:2222"])
@pytest.mark.parametrize("salt", [None, b"twenty bytes of salt"])
def test_what_is_written_openssh_and_we_find_again(tmp_path: Path, name: str, salt: bytes | None) -> None:
    file = tmp_path / "known_hosts"
    key = len(ED).to_bytes(4, "big") + ED.encode() + (32).to_bytes(4, "big") + b"k" * 32
    file.write_text(entry_line(name, ED, key, salt) + "\n")

    found = subprocess.run(["ssh-keygen", "-F", name, "-f", str(file)], capture_output=True, text=True, check=True)

    assert "found: line 1" in found.stdout
    assert KnownHosts(parse(file.read_text(), str(file))).judge(name, ED, key) is Verdict.KNOWN
    assert (name in file.read_text()) is (salt is None)


@pytest.mark.parametrize(("kind", "text"), [(ED, "ED25519"), ("ssh-rsa", "RSA"), ("ecdsa-sha2-nistp256", "ECDSA")])
def test_a_kind_of_key_has_a_name_for_people(kind: str, text: str) -> None:
    assert kind_text(kind) == text


def test_a_key_is_found_under_whichever_names_and_authorities_apart() -> None:
    hosts = known(f"a,b {ED} {b64(KEY)}", f"@cert-authority *.lab {ED} {b64(KEY)}", f"c {ED} {b64(OTHER)}")

    assert hosts.other_places(ED, KEY) == ["known_hosts:1"]
    assert hosts.has_authority("x.lab")
    assert not hosts.has_authority("a")


NAMES = st.sampled_from(
    ["gpu1", "GPU2", "gpu3,10.0.0.3", "gpu1,gpu2", "gpu?", "*,!gpu2", "[gpu1]:2222", "a,,gpu1", hidden("gpu3"), "|1|x"]
)


@given(st.lists(st.tuples(st.sampled_from(["", "@revoked ", "@cert-authority "]), NAMES), max_size=12))
def test_lines_are_found_in_their_order_whether_they_name_a_host_or_describe_it(lines: list[tuple[str, str]]) -> None:
    entries = parse("\n".join(f"{mark}{names} {ED} {b64(KEY)}" for mark, names in lines), "f")
    together = KnownHosts(entries)

    for name in ("gpu1", "gpu2", "gpu3", "10.0.0.3", "[gpu1]:2222", "gpu44"):
        one_by_one = [entry for entry in entries if KnownHosts([entry]).about(name)]
        assert together.about(name) == one_by_one
        assert all(name in matching(entry.names) for entry in one_by_one)


def matching(names: str) -> set[str]:
    """Return which of the hosts above the names mean, as ssh-keygen(1) has it."""
    return {
        "gpu1": {"gpu1"},
        "GPU2": {"gpu2"},
        "gpu3,10.0.0.3": {"gpu3", "10.0.0.3"},
        "gpu1,gpu2": {"gpu1", "gpu2"},
        "gpu?": {"gpu1", "gpu2", "gpu3"},
        "*,!gpu2": {"gpu1", "gpu3", "10.0.0.3", "[gpu1]:2222", "gpu44"},
        "[gpu1]:2222": {"[gpu1]:2222"},
        "a,,gpu1": {"gpu1"},
        hidden("gpu3"): {"gpu3"},
    }[names]
