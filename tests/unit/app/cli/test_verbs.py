"""Every verb is where the command looks for it, and only the wanted one is imported."""

from __future__ import annotations

import importlib
import json
import re
import shlex
import subprocess
import sys

import click
import pytest
from click.testing import CliRunner

from app.cli.main import COMMANDS, OF_OTHERS, main, rankdeck
from app.errors import ExitCode, HostUnreachableError, UsageError
from app.inspect.seen import HostSeen


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_a_verb_is_in_its_module_under_its_own_name(name: str) -> None:
    command = rankdeck.get_command(click.Context(rankdeck), name)

    found = importlib.import_module(COMMANDS[name][0])
    assert command is (getattr(found, name, None) or getattr(found, f"{name}_"))
    assert command.name == name


def test_what_each_verb_does_is_a_whole_sentence_in_its_line_of_80_columns() -> None:
    text = CliRunner().invoke(rankdeck, ["--help"], terminal_width=80).stdout
    lines = text.partition("Commands:\n")[2].splitlines()

    assert [line.split()[0] for line in lines] == sorted(COMMANDS)
    assert [line for line in lines if not line.endswith(".") or line.endswith("...")] == []


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_the_help_of_a_verb_has_an_example_that_can_be_typed(name: str) -> None:
    text = CliRunner().invoke(rankdeck, [name, "--help"], catch_exceptions=False).stdout
    _, _, example = " ".join(text.split()).partition(f"For example: rankdeck {name} ")
    command = rankdeck.get_command(click.Context(rankdeck), name)

    assert example
    assert command is not None
    assert command.make_context(name, shlex.split(example.partition(" > ")[0])) is not None


@pytest.mark.parametrize("verb", ["doctor", "down", "install", "up"])
def test_a_verb_that_takes_hosts_as_they_are_answers_the_option_of_the_others(verb: str) -> None:
    with pytest.raises(UsageError, match=f"{verb} takes hosts without --host") as caught:
        rankdeck.main([verb, "--host", "h8", "--host", "h9"], standalone_mode=False)

    assert caught.value.hint == f"rankdeck {verb} h8 h9"
    assert "--host" not in CliRunner().invoke(rankdeck, [verb, "--help"]).stdout


@pytest.mark.parametrize(
    ("typed", "line"),
    [
        ("--json status", "no such option: --json (a command's options stand behind it: rankdeck COMMAND --help)"),
        ("logs --node h2", "no such option: --node (--host names a host)"),
    ],
)
def test_an_option_that_is_typed_by_habit_gets_the_right_one_or_its_place(
    typed: str, line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["rankdeck", *typed.split()])
    with pytest.raises(SystemExit) as caught:
        main()

    assert (caught.value.code, capsys.readouterr().err) == (ExitCode.USAGE, f"rankdeck: {line}\n")


def test_the_help_of_json_counts_the_objects() -> None:
    texts = {}
    for name in COMMANDS:
        command = rankdeck.get_command(click.Context(rankdeck), name)
        assert command is not None
        texts[name] = {str(one.name): one.help or "" for one in command.params if isinstance(one, click.Option)}
    several = {name for name, help_ in texts.items() if "each time" in help_.get("is_watching", "")}

    assert texts["logs"]["is_json"] == "One JSON object for each line"
    assert several == {"barriers", "inspect", "memory", "ranks", "status", "stragglers"}


def test_no_verb_is_forgotten() -> None:
    listed = rankdeck.list_commands(click.Context(rankdeck))

    assert listed == sorted(COMMANDS)
    assert rankdeck.get_command(click.Context(rankdeck), "no-such-verb") is None


def test_each_command_that_is_named_for_one_of_others_exists() -> None:
    named = {verb for hint in OF_OTHERS.values() for verb in re.findall(r"rankdeck ([a-z]+)", hint)} - {"alone"}

    assert named <= COMMANDS.keys()
    assert not OF_OTHERS.keys() & COMMANDS.keys()


@pytest.mark.parametrize(
    ("typed", "hint"),
    [
        ("stauts", "did you mean status?"),
        ("ls", "rankdeck status"),
        ("top", "rankdeck status --watch, or rankdeck alone for the console"),
        ("ps", "rankdeck ranks"),
        ("jobs", "rankdeck status"),
        ("watch", "rankdeck status --watch, or rankdeck alone for the console"),
        ("tail -f", "rankdeck logs -f"),
        ("abort gpt", "rankdeck stop, or rankdeck kill"),
        ("setup", "rankdeck init, then rankdeck install"),
        ("stat", "did you mean status?"),
        ("train.py --lr 1", "rankdeck run train.py --lr 1"),
        ("torchrun --standalone train.py", "rankdeck run --standalone train.py"),
        ("xyzzy", "rankdeck --help lists them"),
    ],
)
def test_what_is_no_verb_is_refused_with_what_was_perhaps_meant(typed: str, hint: str) -> None:
    with pytest.raises(UsageError) as refused:
        rankdeck.main(typed.split(), standalone_mode=False)

    assert (str(refused.value), refused.value.hint) == (f"{typed.partition(' ')[0]} is no command of rankdeck", hint)


def test_help_and_version_wait_for_nothing_that_trains_or_paints() -> None:
    heavy = "('numpy', 'zmq', 'textual', 'asyncio')"
    proof = f"import sys, app.cli.main; sys.exit(' '.join(m for m in sys.modules if m in {heavy}) or 0)"

    done = subprocess.run([sys.executable, "-P", "-c", proof], capture_output=True, text=True, timeout=60, check=False)

    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ("--console --nccl", "--console takes no job"),
        ("--console --json", "--console takes no job"),
        ("--console train.py", "--console takes no job"),
        ("--read-only", "--read-only is for --console"),
    ],
)
def test_options_of_inspect_that_would_do_nothing_are_refused(options: str, why: str) -> None:
    caught = CliRunner().invoke(rankdeck, ["inspect", "--no-config", *shlex.split(options)]).exception

    assert isinstance(caught, UsageError)
    assert str(caught).startswith(why)


def test_inspect_says_as_json_which_hosts_it_could_not_look_at(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [("h1", HostSeen([], {}, "me", True, None)), ("h2", HostUnreachableError("h2", "it sleeps", "wake it"))]
    monkeypatch.setattr("app.cli.hosts.on_each", lambda *_: answers)

    done = CliRunner().invoke(rankdeck, ["inspect", "--no-config", "--json", "--host", "h1", "--host", "h2"])

    assert done.exit_code == ExitCode.UNREACHABLE
    assert json.loads(done.stdout)["hosts"] == [
        {"host": "h1", "error": None, "hint": ""},
        {"host": "h2", "error": "h2: it sleeps", "hint": "wake it"},
    ]


@pytest.mark.parametrize(
    ("options", "elsewhere"), [("", "on another host: --host; "), ("--host h1", "")], ids=["here", "named"]
)
def test_inspect_where_no_rank_runs_names_the_host_and_where_else_to_look(
    monkeypatch: pytest.MonkeyPatch, options: str, elsewhere: str
) -> None:
    monkeypatch.setattr("app.cli.hosts.on_each", lambda *_: [("h1", HostSeen([], {}, "me", True, None))])

    done = CliRunner().invoke(rankdeck, ["inspect", "--no-config", *options.split()])

    hint = f"{elsewhere}what ranks that are gone may have left: rankdeck help inspect"
    assert (done.exit_code, done.stdout) == (0, f"no training ranks run on h1 ({hint})\n")
