"""The one table of what a person can do: keys, footer, help and palette are all made from it."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from textual.binding import Binding

if TYPE_CHECKING:
    from app.tui.source import ConsoleSource


class Action(NamedTuple):
    """Something a key does.

    Attributes:
        call: The action in Textual's words.
        keys: Key names, separated by commas; none of what is only in the palette.
        shown_keys: The keys as people write them.
        title: For the footer and the palette.
        help: A sentence.
        footer: Place in the footer, the lowest stays longest; 0 is not in it.
        is_fault: Only there where faults may be injected.
        is_control: Only there where something may be done to the job.
        is_start: Only there where another program can be started.
        is_replay: Only there where a recording is played.
        in_palette: False for what only makes sense on a key.
    """

    call: str
    keys: str
    shown_keys: str
    title: str
    help: str
    footer: int = 0
    is_fault: bool = False
    is_control: bool = False
    is_start: bool = False
    is_replay: bool = False
    in_palette: bool = True


VIEW_NAMES = ("overview", "ranks", "barriers", "stragglers", "memory", "logs", "charts", "events")
"""Views in the order of their number keys."""

ACTIONS = (
    Action(
        "app.show_view('overview')",
        "1",
        "1",
        "Overview",
        "The verdict, nodes, ranks, waits, loss and last log lines on one page.",
    ),
    Action(
        "app.show_view('ranks')",
        "2",
        "2",
        "Ranks",
        "Every rank: state, step, collective, how long it waits, where it stands.",
    ),
    Action(
        "app.show_view('barriers')",
        "3",
        "3",
        "Barriers",
        "Who waits for whom, at which collective or barrier, for how long, on which line.",
    ),
    Action(
        "app.show_view('stragglers')",
        "4",
        "4",
        "Stragglers",
        "Which rank costs the others time, and what it does meanwhile that they do not.",
    ),
    Action("app.show_view('memory')", "5", "5", "Memory", "Memory of every rank beside the median, and of every node."),
    Action("app.show_view('logs')", "6", "6", "Logs", "What all ranks print, merged as it comes."),
    Action(
        "app.show_view('charts')",
        "7",
        "7",
        "Charts",
        "How loss, throughput, waiting, GPUs and memory went over time, and when verdicts came.",
    ),
    Action(
        "app.show_view('events')",
        "8",
        "8",
        "Events",
        "What happened and when: verdicts that came and went, nodes, checkpoints, and what was done.",
    ),
    Action("app.next_view(1)", "tab", "tab", "Next view", "Go to the next view.", in_palette=False),
    Action(
        "app.next_view(-1)", "shift+tab", "shift+tab", "Previous view", "Go to the previous view.", in_palette=False
    ),
    Action("app.scroll('rows', -1)", "up,k", "up k", "Up", "Select the rank above, or scroll up.", in_palette=False),
    Action(
        "app.scroll('rows', 1)", "down,j", "down j", "Down", "Select the rank below, or scroll down.", in_palette=False
    ),
    Action("app.scroll('pages', -1)", "pageup", "PageUp", "Page up", "Go up by a screenful.", in_palette=False),
    Action("app.scroll('pages', 1)", "pagedown", "PageDown", "Page down", "Go down by a screenful.", in_palette=False),
    Action("app.scroll('edge', -1)", "home,g", "Home g", "First line", "Go to the first rank or the oldest log line."),
    Action(
        "app.scroll('edge', 1)",
        "end,G",
        "End G",
        "Last line",
        "Go to the last rank; in the logs, follow new lines again.",
    ),
    Action(
        "app.scroll('side', -1)",
        "left,h",
        "left h",
        "Left",
        "Scroll log lines back; in the grid and on a rank's page: the rank before.",
        in_palette=False,
    ),
    Action(
        "app.scroll('side', 1)",
        "right,l",
        "right l",
        "Right",
        "Scroll log lines to the side; in the grid and on a rank's page: the next rank.",
        in_palette=False,
    ),
    Action("screen.zoom(-1)", "plus,equals_sign", "+", "Zoom in", "In the charts: a shorter time."),
    Action("screen.zoom(1)", "minus", "-", "Zoom out", "In the charts: a longer time."),
    Action(
        "screen.open",
        "enter",
        "Enter",
        "Open",
        "Show all that is known of the selected rank, or of the one that a row is about; there, its log lines.",
    ),
    Action(
        "screen.copy",
        "y",
        "y",
        "Copy",
        "Copy the selected rank, log line or event, else the verdict and its hint, through the terminal (OSC 52).",
    ),
    Action(
        "screen.filter",
        "slash",
        "/",
        "Filter",
        "Show only some ranks, log lines or events: state=waiting node=gpu* rank=0,3-5 word /regex/ !not.",
        footer=6,
    ),
    Action(
        "screen.problems",
        "p",
        "p",
        "Problems only",
        "Show only ranks, log lines and events that are not well, or everything again.",
    ),
    Action(
        "screen.back",
        "escape",
        "Esc",
        "Back",
        "Take the filter away, or go back to where one came from.",
        in_palette=False,
    ),
    Action(
        "screen.freeze",
        "f",
        "f",
        "Freeze picture",
        "Let the picture stand still, or go on; what comes meanwhile is kept.",
    ),
    Action(
        "screen.sort",
        "o",
        "o",
        "Sort",
        "Sort the ranks by the next: rank, wait, step, memory, CPU.",
    ),
    Action(
        "screen.sort('rank')",
        "",
        "",
        "Sort by rank",
        "Sort the ranks by their number.",
    ),
    Action(
        "screen.sort('wait')",
        "",
        "",
        "Sort by wait",
        "Sort the ranks by how long they wait, the longest first.",
    ),
    Action(
        "screen.sort('step')",
        "",
        "",
        "Sort by step",
        "Sort the ranks by their step, the lowest first.",
    ),
    Action(
        "screen.sort('memory')",
        "",
        "",
        "Sort by memory",
        "Sort the ranks by the memory they hold, the most first.",
    ),
    Action(
        "screen.sort('cpu')",
        "",
        "",
        "Sort by CPU",
        "Sort the ranks by the cores they keep busy, the most first.",
    ),
    Action("screen.shape", "v", "v", "Grid or table", "Show the ranks as a grid of their states, or as a table."),
    Action(
        "screen.error(1)",
        "e",
        "e",
        "Next error",
        "In the logs: go to the next line at level error.",
    ),
    Action(
        "screen.error(-1)",
        "E",
        "E",
        "Previous error",
        "In the logs: go to the line at level error before.",
    ),
    Action(
        "screen.collapse",
        "c",
        "c",
        "Collapse",
        "In the logs: show lines that several ranks print alike as one, or each again.",
    ),
    Action(
        "screen.root_cause",
        "r",
        "r",
        "Root cause",
        "Once a rank has failed: its traceback in the logs, and back to the lines.",
    ),
    Action(
        "screen.stacks",
        "s",
        "s",
        "Stacks",
        "Where every rank stands, frame by frame: identical stacks together, the odd one first.",
        footer=7,
    ),
    Action(
        "app.control",
        "x",
        "x",
        "Stop, restart",
        "End the job in an orderly way or at once, or start it again, also with other ranks, after asking.",
        footer=7,
        is_control=True,
    ),
    Action(
        "app.start_program",
        "",
        "",
        "Start a program",
        "Start another program on this host, where no job runs any more, after asking.",
        is_start=True,
    ),
    Action(
        "app.fault",
        "F",
        "F",
        "Inject a fault",
        "Freeze, thaw, kill or slow a rank, or do it other harm, after asking.",
        footer=4,
        is_fault=True,
    ),
    Action(
        "screen.play('pause')",
        "space",
        "space",
        "Pause",
        "Let the recording stand still, or go on; at its end, begin anew.",
        footer=4,
        is_replay=True,
    ),
    Action(
        "screen.play('verdict')",
        "n",
        "n",
        "Next verdict",
        "Go on to where something new is said, and stand still there.",
        footer=5,
        is_replay=True,
    ),
    Action("screen.play('back')", "comma", ",", "Back", "Go back by 10 s of the recording.", is_replay=True),
    Action("screen.play('on')", "full_stop", ".", "On", "Go on by 10 s of the recording.", is_replay=True),
    Action("screen.play('slower')", "left_square_bracket", "[", "Slower", "Play more slowly.", is_replay=True),
    Action("screen.play('faster')", "right_square_bracket", "]", "Faster", "Play faster.", is_replay=True),
    Action("screen.help", "question_mark,f1", "?", "Help", "Show every key.", footer=2),
    Action(
        "app.command_palette",
        "ctrl+p,colon",
        "ctrl+p :",
        "Palette",
        "Find and run any action by name.",
        footer=3,
        in_palette=False,
    ),
    Action("app.quit", "q", "q ctrl+c", "Quit", "End the session and leave.", footer=1),
)

PRIORITY_BINDINGS = [Binding("ctrl+c,ctrl+q", "quit", "Quit", show=False, priority=True, system=True)]
"""Work above every dialog."""


def screen_bindings() -> list[Binding]:
    """Return the bindings of the main screen."""
    return [Binding(action.keys, action.call, action.title, show=False) for action in ACTIONS if action.keys]


def available(source: ConsoleSource) -> list[Action]:
    """Return the actions of a session."""
    is_replay = source.player is not None
    return [
        action
        for action in ACTIONS
        if (source.can_inject or not action.is_fault)
        and (source.control is not None or not action.is_control)
        and (source.starter is not None or not action.is_start)
        and (is_replay or not action.is_replay)
    ]
