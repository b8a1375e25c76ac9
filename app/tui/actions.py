"""The one table of user actions: keys, footer, help and palette are made from it.

`Keymap` holds the keys in use: those of the user's settings, else those of `ACTIONS`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from app.settings.keys import shown_key
from app.settings.schema import VIEWS
from app.settings.themes import THEMES

if TYPE_CHECKING:
    from collections.abc import Mapping

    from app.tui.source import ConsoleSource


class Action(NamedTuple):
    """An action of the user, by key or palette.

    Attributes:
        name: The name in a user's file (`[keys]`); it never changes.
        call: The action as Textual's action string.
        keys: Textual's names of its default keys, separated by commas; empty for an action only in the palette.
        title: Title in the footer and the palette.
        help: Sentence for the help screen.
        footer: Place in the footer, the lowest stays longest; 0 leaves it out.
        is_fault: Whether it exists only where faults may be injected.
        is_control: Whether it exists only where the user may act on the job.
        is_start: Whether it exists only where another program can be started.
        is_doctor: Whether it exists only where hosts can be checked; in a replay its key shows that they cannot.
        is_question: Whether it exists only while a host wants an answer.
        is_outside: Whether it exists only where jobs that rankdeck did not start can be shown.
        is_replay: Whether it exists only in a replay.
        in_palette: False for an action that only makes sense on a key.
    """

    name: str
    call: str
    keys: str
    title: str
    help: str
    footer: int = 0
    is_fault: bool = False
    is_control: bool = False
    is_start: bool = False
    is_doctor: bool = False
    is_question: bool = False
    is_outside: bool = False
    is_replay: bool = False
    in_palette: bool = True

    @property
    def contexts(self) -> frozenset[str]:
        """Consoles that have the action: `live`, `replay` or both."""
        if self.is_replay:
            return frozenset({"replay"})
        is_live = self.is_fault or self.is_control or self.is_question or self.is_outside
        return frozenset({"live"} if is_live else {"live", "replay"})


VIEW_NAMES = VIEWS
"""Views in the order of their number keys."""

ACTIONS = (
    Action(
        "overview",
        "app.show_view('overview')",
        "1",
        "Overview",
        "The verdict, nodes, ranks, waits, loss and last log lines on one page.",
    ),
    Action(
        "ranks",
        "app.show_view('ranks')",
        "2",
        "Ranks",
        "Every rank: state, step, collective, how long it waits, where it stands.",
    ),
    Action(
        "barriers",
        "app.show_view('barriers')",
        "3",
        "Barriers",
        "Who waits for whom, at which collective or barrier, for how long, on which line.",
    ),
    Action(
        "stragglers",
        "app.show_view('stragglers')",
        "4",
        "Stragglers",
        "Which rank costs the others time, and what it does that they do not.",
    ),
    Action(
        "memory", "app.show_view('memory')", "5", "Memory", "Memory of every rank beside the median, and of every node."
    ),
    Action("logs", "app.show_view('logs')", "6", "Logs", "What all ranks print, merged as it comes."),
    Action(
        "charts",
        "app.show_view('charts')",
        "7",
        "Charts",
        "How loss, throughput, waiting, GPUs and memory went over time, and when verdicts came.",
    ),
    Action(
        "events",
        "app.show_view('events')",
        "8",
        "Events",
        "What happened and when: verdicts that came and went, nodes, checkpoints, and what was done.",
    ),
    Action("next_view", "app.next_view(1)", "tab", "Next view", "Go to the next view.", in_palette=False),
    Action(
        "previous_view", "app.next_view(-1)", "shift+tab", "Previous view", "Go to the previous view.", in_palette=False
    ),
    Action("up", "app.scroll('rows', -1)", "up,k", "Up", "Select the rank above, or scroll up.", in_palette=False),
    Action(
        "down", "app.scroll('rows', 1)", "down,j", "Down", "Select the rank below, or scroll down.", in_palette=False
    ),
    Action("page_up", "app.scroll('pages', -1)", "pageup", "Page up", "Go up by a screenful.", in_palette=False),
    Action("page_down", "app.scroll('pages', 1)", "pagedown", "Page down", "Go down by a screenful.", in_palette=False),
    Action("first", "app.scroll('edge', -1)", "home,g", "First line", "Go to the first rank or the oldest log line."),
    Action(
        "last",
        "app.scroll('edge', 1)",
        "end,G",
        "Last line",
        "Go to the last rank; in the logs, follow new lines again.",
    ),
    Action(
        "left",
        "app.scroll('side', -1)",
        "left,h",
        "Left",
        "Scroll log lines back; in the grid and on a rank's page: the rank before.",
        in_palette=False,
    ),
    Action(
        "right",
        "app.scroll('side', 1)",
        "right,l",
        "Right",
        "Scroll log lines to the side; in the grid and on a rank's page: the next rank.",
        in_palette=False,
    ),
    Action("zoom_in", "screen.zoom(-1)", "plus,equals_sign", "Zoom in", "In the charts: a shorter time."),
    Action("zoom_out", "screen.zoom(1)", "minus", "Zoom out", "In the charts: a longer time."),
    Action(
        "open",
        "screen.open",
        "enter",
        "Open",
        "Show all that is known of the selected rank, or of the one that a row is about; there, its log lines.",
    ),
    Action(
        "copy",
        "screen.copy",
        "y",
        "Copy",
        "Copy the selected rank, log line or event, else the verdict and its hint, through the terminal (OSC 52).",
    ),
    Action(
        "filter",
        "screen.filter",
        "slash",
        "Filter",
        "Show only some ranks, log lines or events: state=waiting node=gpu* rank=0,3-5 word /regex/ !not.",
        footer=6,
    ),
    Action(
        "problems",
        "screen.problems",
        "p",
        "Problems only",
        "Show only ranks, log lines and events that are not well, or everything again.",
    ),
    Action(
        "back",
        "screen.back",
        "escape",
        "Back",
        "Take the filter away, or go back to where one came from, and from an inspected job to its own.",
        in_palette=False,
    ),
    Action(
        "freeze",
        "screen.freeze",
        "f",
        "Freeze picture",
        "Let the picture stand still, or go on; what comes in between is kept.",
    ),
    Action(
        "sort",
        "screen.sort",
        "o",
        "Sort",
        "Sort the ranks by the next: rank, wait, step, memory, CPU.",
    ),
    Action(
        "sort_rank",
        "screen.sort('rank')",
        "",
        "Sort by rank",
        "Sort the ranks by their number.",
    ),
    Action(
        "sort_wait",
        "screen.sort('wait')",
        "",
        "Sort by wait",
        "Sort the ranks by how long they wait, the longest first.",
    ),
    Action(
        "sort_step",
        "screen.sort('step')",
        "",
        "Sort by step",
        "Sort the ranks by their step, the lowest first.",
    ),
    Action(
        "sort_memory",
        "screen.sort('memory')",
        "",
        "Sort by memory",
        "Sort the ranks by the memory they hold, the most first.",
    ),
    Action(
        "sort_cpu",
        "screen.sort('cpu')",
        "",
        "Sort by CPU",
        "Sort the ranks by the cores they keep busy, the most first.",
    ),
    Action("grid", "screen.shape", "v", "Grid or table", "Show the ranks as a grid of their states, or as a table."),
    Action(
        "next_error",
        "screen.error(1)",
        "e",
        "Next error",
        "In the logs: go to the next line at level error.",
    ),
    Action(
        "previous_error",
        "screen.error(-1)",
        "E",
        "Previous error",
        "In the logs: go to the line at level error before.",
    ),
    Action(
        "collapse",
        "screen.collapse",
        "c",
        "Collapse",
        "In the logs: show lines that several ranks print alike as one, or each again.",
    ),
    Action(
        "root_cause",
        "screen.root_cause",
        "r",
        "Root cause",
        "Once a rank has failed: its traceback in the logs, and back to the lines.",
    ),
    Action(
        "stacks",
        "screen.stacks",
        "s",
        "Stacks",
        "Where every rank stands, frame by frame: identical stacks together, the odd one first.",
        footer=5,
    ),
    Action(
        "control",
        "app.control",
        "x",
        "Stop, restart",
        "End the job in an orderly way or at once, or start it again, also with other ranks, after asking.",
        footer=3,
        is_control=True,
    ),
    Action(
        "start_program",
        "app.start_program",
        "",
        "Start a program",
        "Start another program on this host, where no job runs any more, after asking.",
        is_start=True,
    ),
    Action(
        "doctor",
        "screen.doctor",
        "d",
        "Doctor",
        "Look at all hosts, as before a job: what is wrong with any, or differs between them, and what to do about it.",
        footer=8,
        is_doctor=True,
    ),
    Action(
        "answer",
        "screen.answer",
        "a",
        "Answer",
        "Try a lost host again that refused our keys or asks: a passphrase, a password, a second factor, its key.",
        footer=2,
        is_question=True,
    ),
    Action(
        "outside",
        "screen.outside",
        "i",
        "Inspect",
        "Look from outside at jobs that rankdeck did not start, one after the other, then at its own again.",
        footer=8,
        is_outside=True,
    ),
    Action(
        "fault",
        "app.fault",
        "F",
        "Inject a fault",
        "Freeze, thaw, kill or slow a rank, or do it other harm, after asking.",
        footer=4,
        is_fault=True,
    ),
    Action(
        "pause",
        "screen.play('pause')",
        "space",
        "Pause",
        "Let the recording stand still, or go on; at its end, start over.",
        footer=4,
        is_replay=True,
    ),
    Action(
        "next_verdict",
        "screen.play('verdict')",
        "n",
        "Next verdict",
        "Go on to the next verdict, and stand still there.",
        footer=5,
        is_replay=True,
    ),
    Action("replay_back", "screen.play('back')", "comma", "Back", "Go back by 10 s of the recording.", is_replay=True),
    Action("replay_on", "screen.play('on')", "full_stop", "On", "Go on by 10 s of the recording.", is_replay=True),
    Action("slower", "screen.play('slower')", "left_square_bracket", "Slower", "Play more slowly.", is_replay=True),
    Action("faster", "screen.play('faster')", "right_square_bracket", "Faster", "Play faster.", is_replay=True),
    Action("help", "screen.help", "question_mark,f1", "Help", "Show every key.", footer=2),
    Action(
        "palette",
        "app.command_palette",
        "ctrl+p,colon",
        "Palette",
        "Find and run any action by name.",
        footer=7,
        in_palette=False,
    ),
    Action(
        "suspend", "app.suspend_process", "ctrl+z", "To the shell", "Go to the shell; fg comes back.", in_palette=False
    ),
    Action("quit", "app.quit", "q", "Quit", "End the session and leave.", footer=1),
    *(
        Action(f"theme_{name}", f"app.wear('{name}')", "", f"Theme: {name}", f"Change the colours: {theme.sentence}.")
        for name, theme in THEMES.items()
    ),
)


SIGNALS = "Send a signal to the ranks of a job that rankdeck did not start, after asking."
"""What the control of such a job does."""
SHOWN_OUTSIDE = 5
"""Place in the footer of the keys that such a job has, while it is shown."""


def available(source: ConsoleSource) -> list[Action]:
    is_replay = source.player is not None
    has_question = source.questions is not None and bool(source.questions.waiting)
    outside = source.outside if source.outside is not None and source.outside.is_shown else None
    signals = outside is not None and outside.can_signal
    return [
        action if outside is None else _of_outside(action, leads_back=outside.leads_back)
        for action in ACTIONS
        if (source.can_inject or not action.is_fault)
        and (source.control is not None or signals or not action.is_control)
        and (source.starter is not None or not action.is_start)
        and (source.doctor is not None or not action.is_doctor)
        and (has_question or not action.is_question)
        and (source.outside is not None or not action.is_outside)
        and (is_replay or not action.is_replay)
    ]


def _of_outside(action: Action, *, leads_back: bool) -> Action:
    """Return an action as it is while a job is shown that rankdeck did not start."""
    if action.is_control:
        return action._replace(title="Signals", help=SIGNALS, footer=SHOWN_OUTSIDE)
    is_shown = action.is_outside or (leads_back and action.name == "back")
    return action._replace(footer=SHOWN_OUTSIDE) if is_shown else action


class Keymap:
    """The keys of every action, by its name."""

    def __init__(self, chosen: Mapping[str, tuple[str, ...]] | None = None) -> None:
        """Take the chosen keys, as Textual's names; actions that are not in `chosen` keep their default keys."""
        usual = {action.name: tuple(filter(None, action.keys.split(","))) for action in ACTIONS}
        self._keys = {**usual, **(chosen or {})}

    def keys(self, name: str) -> tuple[str, ...]:
        """Return Textual's names of an action's keys."""
        return self._keys[name]

    def shown(self, name: str) -> str:
        """Return an action's keys as users write them; empty when it has none."""
        return " ".join(map(shown_key, self._keys[name]))

    def first(self, name: str) -> str:
        """Return the first of an action's keys as users write it; empty when it has none."""
        keys = self._keys[name]
        return shown_key(keys[0]) if keys else ""

    def hint(self, name: str, text: str, *, head: str = "") -> str:
        """Return `head` and `s: text`; empty when the action has no key."""
        key = self.first(name)
        return f"{head}{key}: {text}" if key else ""

    def views(self) -> str:
        """Return the keys of the views in short, `1-8`; the key of the next view when they are not consecutive."""
        keys = [self.first(name) for name in VIEW_NAMES]
        row = [str(int(keys[0]) + place) for place in range(len(keys))] if keys[0].isdigit() else []
        return f"{keys[0]}-{keys[-1]}" if keys == row else self.first("next_view")
