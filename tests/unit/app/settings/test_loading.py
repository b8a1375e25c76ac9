"""Settings are put together from files, environment and command line, and what is wrong is said in one line."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from app.errors import ExitCode, UsageError
from app.manual import markdown
from app.settings.loading import load, user_file
from app.tui.actions import ACTIONS

if TYPE_CHECKING:
    from pathlib import Path

    from app.settings.loading import Loaded


class Desk:
    """A home and a project, each with its file."""

    def __init__(self, tmp_path: Path) -> None:
        self.user = tmp_path / "home" / ".config" / "rankdeck" / "config.toml"
        self.project = tmp_path / "work" / "project" / "rankdeck.toml"
        self.user.parent.mkdir(parents=True)
        self.project.parent.mkdir(parents=True)
        self._home = tmp_path / "home"

    def load(self, *assignments: str, **environ: str) -> Loaded:
        environ = {"HOME": str(self._home), **environ}
        return load(ACTIONS, assignments, environ=environ, directory=self.project.parent)

    def load_without_files(self) -> Loaded:
        environ = {"HOME": str(self._home)}
        return load(ACTIONS, has_files=False, environ=environ, directory=self.project.parent)


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path)


def lines(loaded: Loaded) -> list[str]:
    return [str(trouble) for trouble in loaded.troubles]


def test_without_files_everything_is_as_usual(desk: Desk) -> None:
    loaded = desk.load()
    settings = loaded.settings()

    assert {str(entry.origin) for entry in loaded.entries.values()} == {"default"}
    assert (settings.console.theme, settings.console.ascii, settings.console.start_view) == ("deck", "auto", "overview")
    assert settings.thresholds.stall_s == 10.0
    assert settings.console.keys["quit"] == ("q",)
    assert loaded.files == []


def test_each_layer_wins_over_those_below_and_tells_its_place(desk: Desk) -> None:
    def theme(*assignments: str, **environ: str) -> tuple[object, str]:
        entry = desk.load(*assignments, **environ).entries["console.theme"]
        return entry.value, str(entry.origin)

    desk.user.write_text('[console]\nstart_view = "logs"\ntheme = "light"\n')
    assert theme() == ("light", f"{desk.user}:3")
    desk.project.write_text('[console]\ntheme = "contrast"\n')
    assert theme() == ("contrast", f"{desk.project}:2")
    assert theme(NO_COLOR="1") == ("plain", "NO_COLOR")
    assert theme(NO_COLOR="1", RANKDECK_THEME="ansi") == ("ansi", "RANKDECK_THEME")
    assert theme("console.theme=deck", RANKDECK_THEME="ansi") == ("deck", "--set")
    assert theme("console.theme=deck", "console.theme=light") == ("light", "--set")
    start_view = desk.load("console.theme=deck").entries["console.start_view"]
    assert (start_view.value, str(start_view.origin)) == ("logs", f"{desk.user}:2")


def test_the_nearest_project_file_is_found_from_below_it(desk: Desk) -> None:
    (desk.project.parent.parent / "rankdeck.toml").write_text('[console]\ntheme = "light"\n')
    desk.project.write_text("[thresholds]\nstall_s = 20\n")
    below = desk.project.parent / "a" / "b"
    below.mkdir(parents=True)

    loaded = load(ACTIONS, environ={"HOME": "/nonexistent"}, directory=below)

    assert loaded.files == [desk.project]
    assert loaded.settings().thresholds.stall_s == 20.0
    assert loaded.settings().console.theme == "deck"


def test_other_tables_of_a_project_file_are_left_alone(desk: Desk) -> None:
    desk.project.write_text(
        'x = 1\n[cluster]\nname = "lab"\n[[node]]\nhost = "gpu1"\n[job.gpt]\ncommand = ["t.py"]\n'
        "[console]\nascii = true\n"
    )

    loaded = desk.load()

    assert lines(loaded) == []
    assert loaded.settings().console.ascii == "true"


def test_a_project_file_can_only_choose_looks_keys_and_thresholds(desk: Desk) -> None:
    tables = {name.partition(".")[0] for name in desk.load().known}

    assert tables == {"console", "thresholds", "keys"}
    assert {name for name in desk.load().known if name.startswith("console.")} == {
        "console.theme",
        "console.ascii",
        "console.start_view",
    }


def test_the_example_of_the_manual_is_accepted_and_changes_every_thing_it_names(desk: Desk) -> None:
    example = markdown("settings").partition("<!-- settings -->\n```toml\n")[2].partition("```\n<!-- /settings -->")[0]
    desk.user.write_text(example)

    loaded = desk.load()

    assert lines(loaded) == []
    assert len([entry for entry in loaded.entries.values() if entry.origin.is_file]) == 12
    assert loaded.settings().console.keys["stacks"] == ("t", "f4")


def test_xdg_config_home_is_honoured_where_it_is_absolute(tmp_path: Path) -> None:
    assert user_file({"XDG_CONFIG_HOME": "/x"}, tmp_path).as_posix() == "/x/rankdeck/config.toml"
    assert user_file({"XDG_CONFIG_HOME": "x"}, tmp_path) == tmp_path / ".config" / "rankdeck" / "config.toml"
    assert user_file({}, tmp_path) == tmp_path / ".config" / "rankdeck" / "config.toml"


@pytest.mark.parametrize(
    ("text", "line", "what"),
    [
        ("[console]\ntheme = light\n", 2, "it is not TOML: Invalid value"),
        (
            '[console]\n\ntheme = "ligth"\n',
            3,
            "console.theme: 'ligth' is none of deck, light, contrast, ansi, plain; the nearest is light",
        ),
        ("[console]\ntheme = 3\n", 2, "console.theme: 3 is none of deck, light, contrast, ansi, plain"),
        ("[console]\nascii = 1\n", 2, "console.ascii: 1 is none of auto, true, false"),
        ('[console]\nteme = "light"\n', 2, "console.teme: no such setting; the nearest is console.theme"),
        ("[console]\nxyz = 1\n", 2, "console.xyz: no such setting"),
        (
            "\n[treshold]\nstall_s = 1\n",
            2,
            "treshold: no such table; there are console, thresholds, keys; the nearest is thresholds",
        ),
        (
            '\nconsole = { theme = "x" }\n',
            2,
            "console.theme: 'x' is none of deck, light, contrast, ansi, plain",
        ),
        ("console = 3\n", 1, "console is a table: write [console] above its settings"),
        ("[[keys]]\nquit = 'q'\n", 1, "keys is a table: write [keys] above its settings"),
        ("[thresholds]\nstall_s = '9'\n", 2, "thresholds.stall_s: '9' is no number of seconds"),
        ("[thresholds]\nstall_s = true\n", 2, "thresholds.stall_s: true is no number of seconds"),
        ("[thresholds]\nstall_s = nan\n", 2, "thresholds.stall_s: nan is no number of seconds"),
        ("[thresholds]\nstall_s = 0.5\n", 2, "thresholds.stall_s: 0.5 s is not from 1 to 86400 s"),
        (
            "[thresholds]\nabandon_s = 60\n",
            2,
            "thresholds.abandon_s: give it where a job is started: rankdeck run --abandon-after",
        ),
        (
            "[thresholds]\nsilent_s = 20\nlost_s = 60\n",
            2,
            (
                "thresholds.silent_s: 20 s is not below thresholds.stall_s (10 s, default): "
                "who is silent would be taken for slow"
            ),
        ),
        (
            "[thresholds]\nlost_s = 1.5\n",
            2,
            (
                "thresholds.lost_s: 1.5 s is not above thresholds.silent_s (2 s, default): "
                "a node would be lost before it is silent"
            ),
        ),
        ("[keys]\nfreze = 'z'\n", 2, "keys.freze: no such setting; the nearest is keys.freeze"),
        ("[keys]\nfreeze = 'pagedwon'\n", 2, "keys.freeze: 'pagedwon' is no key; the nearest is pagedown"),
        (
            "[keys]\nfreeze = ['z', 'ctrl+c']\n",
            2,
            "keys.freeze: 'ctrl+c' always leaves the console, whatever else is set",
        ),
        ("[keys]\nfreeze = 3\n", 2, 'keys.freeze: 3 is no key or list of keys: "x", ["x", "f2"], [] for none'),
        (
            "[keys]\nfreeze = ['a', 'b', 'd', 'i', 'm', 't', 'u', 'w', 'z']\n",
            2,
            "keys.freeze: 9 keys are more than 8",
        ),
        (
            "[keys]\nfreeze = 'q'\n",
            2,
            "keys.freeze: q is also the key of quit (default): give one of them another, or [] for none",
        ),
        ("[keys]\nquit = []\n", 2, "keys.quit: quit keeps a key: without one nobody finds out"),
        ("[keys]\nhelp = []\n", 2, "keys.help: help keeps a key: without one nobody finds out"),
        ("[keys]\npalette = []\n", 2, "keys.palette: palette keeps a key: without one nobody finds out"),
    ],
)
def test_what_is_wrong_is_said_in_one_line_with_its_place(text: str, line: int, what: str, desk: Desk) -> None:
    desk.user.write_text(text)

    assert lines(desk.load()) == [f"{desk.user}:{line}: {what}"]


def test_two_keys_of_one_file_that_collide_are_blamed_on_the_later_line(desk: Desk) -> None:
    desk.user.write_text("[keys]\nstacks = 'z'\nfreeze = 'z'\n")

    assert lines(desk.load()) == [
        (
            f"{desk.user}:3: keys.freeze: z is also the key of stacks ({desk.user}:2): "
            "give one of them another, or [] for none"
        )
    ]


def test_a_key_may_be_of_two_actions_that_are_never_there_together(desk: Desk) -> None:
    desk.user.write_text("[keys]\ncontrol = 'n'\n")
    assert lines(desk.load()) == []

    desk.user.write_text("[keys]\nfreeze = 'n'\n")
    assert "also the key of next_verdict" in lines(desk.load())[0]


def test_two_actions_may_change_their_keys(desk: Desk) -> None:
    desk.user.write_text("[keys]\nfreeze = 's'\nstacks = ['f', 'F5']\n")

    keys = desk.load().settings().console.keys
    assert (keys["freeze"], keys["stacks"]) == (("s",), ("f", "f5"))


@pytest.mark.parametrize(
    ("assignment", "what"),
    [
        ("console.theme", "'console.theme' is no KEY=VALUE, as console.theme=light"),
        ("theme=light", "theme: no such setting; the nearest is console.theme"),
        ("thresholds.stall_s=ten", "thresholds.stall_s: 'ten' is no number of seconds"),
        ("keys.freeze=q", "keys.freeze: q is also the key of quit (default): give one of them another, or [] for none"),
        ("keys.quit=", "keys.quit: quit keeps a key: without one nobody finds out"),
    ],
)
def test_what_is_wrong_with_an_assignment_is_said_of_it(assignment: str, what: str, desk: Desk) -> None:
    assert lines(desk.load(assignment)) == [f"--set: {what}"]


def test_assignments_take_keys_between_commas(desk: Desk) -> None:
    keys = desk.load("keys.freeze=z, F6", "keys.back=[]", "keys.sort=;", "keys.replay_back=,").settings().console.keys

    assert (keys["freeze"], keys["back"]) == (("z", "f6"), ())
    assert (keys["sort"], keys["replay_back"]) == (("semicolon",), ("comma",))


@pytest.mark.parametrize(
    ("environ", "line"),
    [
        (
            {"RANKDECK_THEME": "drak"},
            "RANKDECK_THEME: console.theme: 'drak' is none of deck, light, contrast, ansi, plain",
        ),
        ({"RANKDECK_ASCII": "yes"}, "RANKDECK_ASCII: console.ascii: 'yes' is none of auto, true, false"),
    ],
)
def test_what_is_wrong_with_a_variable_is_said_of_it(environ: dict[str, str], line: str, desk: Desk) -> None:
    assert lines(desk.load(**environ)) == [line]


def test_all_that_is_wrong_is_told_and_the_way_on_with_the_first(desk: Desk) -> None:
    desk.user.write_text("[console]\ntheme = 1\nascii = 2\n")
    desk.project.write_text("[thresholds]\nstall_s = []\n")

    loaded = desk.load()
    with pytest.raises(UsageError) as caught:
        loaded.settings()

    assert [line.partition(": ")[0] for line in lines(loaded)] == [
        f"{desk.user}:2",
        f"{desk.user}:3",
        f"{desk.project}:2",
    ]
    assert str(caught.value) == lines(loaded)[0]
    assert caught.value.hint == "2 more: rankdeck config --check; --no-config goes on without the files"
    assert caught.value.exit_code == ExitCode.USAGE
    assert desk.load_without_files().settings().console.theme == "deck"


def test_what_is_wrong_on_the_command_line_is_not_blamed_on_files(desk: Desk) -> None:
    with pytest.raises(UsageError) as caught:
        desk.load("console.theme=x").settings()

    assert caught.value.hint == ""


def test_a_strange_file_is_one_line_whatever_it_is(desk: Desk) -> None:
    desk.user.write_bytes(b"[console]\n\ntheme = '\xff'\n")
    assert lines(desk.load()) == [f"{desk.user}:3: it is not UTF-8 from this line on"]

    desk.user.write_text("x = '" + "a" * 2**20 + "'\n")
    assert lines(desk.load()) == [f"{desk.user}:1: it is larger than 1 MiB"]

    desk.user.unlink()
    desk.user.mkdir()
    assert lines(desk.load()) == [f"{desk.user}:1: it cannot be read: Is a directory"]

    desk.user.rmdir()
    os.mkfifo(desk.user)
    assert lines(desk.load()) == [f"{desk.user}:1: it is not a file"]

    desk.user.unlink()
    desk.user.symlink_to("nowhere")
    assert lines(desk.load()) == [f"{desk.user}:1: it is a link to a file that is not there"]

    desk.user.unlink()
    desk.user.symlink_to(desk.user.name)
    assert lines(desk.load()) == [f"{desk.user}:1: it cannot be read: Too many levels of symbolic links"]


def test_a_byte_order_mark_is_no_error(desk: Desk) -> None:
    desk.user.write_bytes(b"\xef\xbb\xbf[console]\r\ntheme = 'light'\r\n")

    assert desk.load().settings().console.theme == "light"


def test_what_a_file_says_never_reaches_the_terminal_as_more_than_text(desk: Desk) -> None:
    desk.project.write_text('[keys]\n"a\\u001b[2Jb" = 1\n"' + "x" * 5000 + '" = 1\n')

    for line in lines(desk.load()):
        assert line.isprintable()
        assert len(line) < 500


def test_who_has_no_home_and_no_directory_has_the_usual_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()

    assert load(ACTIONS, environ={"HOME": "/nonexistent"}).settings().console.theme == "deck"
