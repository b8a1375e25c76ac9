from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.wire.secret_mask import MASK, masked_argv, masked_env, masked_text, may_hold_secret


@pytest.mark.parametrize(
    "name",
    [
        "WANDB_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "DB_PASSWORD", "PGPASSWORD", "MY_PASSWD", "SENTRY_DSN",
        "OPENAI_APIKEY", "GITHUB_PAT", "SLACK_WEBHOOK", "api-key", "SSH_PRIVATE_KEY", "COMET_AUTH", "MY.TOKEN",
        "DB_PASS", "SSHPASS",
    ],
)  # fmt: skip
def test_variables_with_a_secrets_name_are_masked(name: str) -> None:
    assert masked_env({name: "x"}) == {name: MASK}


@pytest.mark.parametrize(
    "name",
    [
        "PATH",
        "KEYBOARD",
        "TOKENIZERS_PARALLELISM",
        "NCCL_DEBUG",
        "MONKEY",
        "AUTHOR",
        "PYTHONPATH",
        "PATIENCE",
        "XAUTHORITY",
    ],
)
def test_other_variables_are_shown(name: str) -> None:
    assert masked_env({name: "value"}) == {name: "value"}


def test_an_empty_secret_is_shown_to_be_empty() -> None:
    assert masked_env({"HF_TOKEN": ""}) == {"HF_TOKEN": ""}


@pytest.mark.parametrize(
    "token",
    [
        "hf_AbCdEfGhIjKlMnOpQrSt", "sk-proj-abcdefghijklmnopqrst", "ghp_0123456789abcdefghijABCDEFGHIJ012345",
        "AKIAIOSFODNN7EXAMPLE", "xoxb-1234567890-abcdef", "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.abc-_1",
    ],
)  # fmt: skip
def test_known_tokens_are_masked_wherever_they_stand(token: str) -> None:
    assert masked_env({"EXTRA": f"--header={token} -v"}) == {"EXTRA": f"--header={MASK} -v"}
    assert masked_text(f"curl {token}") == f"curl {MASK}"
    assert may_hold_secret(f"curl {token}".encode())


def test_a_password_in_a_url_is_masked_and_its_user_is_not() -> None:
    assert masked_text("https://ann:hunter2@example.org/x?y=1") == f"https://ann:{MASK}@example.org/x?y=1"
    assert masked_text("https://ann:hunt@er2@example.org/") == f"https://ann:{MASK}@example.org/"
    assert masked_text("Authorization: Bearer abcdefgh123") == f"Authorization: Bearer {MASK}"
    assert masked_text("https://example.org:8080/a@b") == "https://example.org:8080/a@b"


@pytest.mark.parametrize(
    ("argv", "shown"),
    [
        (["train.py", "--hf-token", "abc", "--lr", "1e-3"], ["train.py", "--hf-token", MASK, "--lr", "1e-3"]),
        (["train.py", "--api_key=abc", "model.key=v"], ["train.py", f"--api_key={MASK}", f"model.key={MASK}"]),
        (["--password", "--verbose", "x"], ["--password", "--verbose", "x"]),
        (["WANDB_API_KEY=abc", "python"], [f"WANDB_API_KEY={MASK}", "python"]),
        (["tokenizer.json", "--tokens-per-batch", "4096"], ["tokenizer.json", "--tokens-per-batch", "4096"]),
    ],
)
def test_arguments_lose_their_secrets(argv: list[str], shown: list[str]) -> None:
    assert masked_argv(argv) == shown


PREFIXES = "hf_ sk- ghp_ gho_ ghs_ github_pat_ glpat- xoxb- xoxs- AKIA ASIA AIza eyJ ://a: ://:"
SECRETS = st.sampled_from([*PREFIXES.split(), "Bearer ", "Basic "])
TAILS = st.text("abcdefghijklmnopABCDEF0123456789-_.@/", max_size=60)


@given(st.lists(st.tuples(TAILS, SECRETS, TAILS), min_size=1, max_size=3))
def test_what_is_masked_is_never_passed_over_unread(parts: list[tuple[str, str, str]]) -> None:
    text = " ".join("".join(part) for part in parts)
    assert may_hold_secret(text.encode()) or masked_text(text) == text
