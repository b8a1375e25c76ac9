"""The top of every view: tabs, the verdict as text, its hint, and the progress of the job."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, cast

from rich.cells import cell_len

from agent.wire.jobs import ENDED_STATES
from app.diagnosis.causes import Severity
from app.diagnosis.rank_facts import UP
from app.diagnosis.verdicts import ENDS
from app.fleet.start_progress import MIN_NODES_SHOWN
from app.text import loss_step_text, loss_text, nodes_text, percent_text, rate_text, seconds_cell, seconds_text
from app.tui.actions import VIEW_NAMES
from app.tui.widgets.drawing import in_step_order, step_style, wrapped
from app.tui.widgets.line_view import LineView
from app.view.rows import OLD_S, SEVERITY_TEXTS
from app.view.verdict_hints import failure_hint

if TYPE_CHECKING:
    from collections.abc import Sequence

    from textual.events import Click

    from app.tui.personal_app import PersonalApp
    from app.tui.ui_state import UiState
    from app.tui.widgets.drawing import Line
    from app.view.rows import Headline, JobRow

MAX_HEADLINE_LINES = 3
MAX_TALL_HEADLINE_LINES = 6
"""Lines of the headline above an overview that leaves lines empty."""
MAX_HINT_LINES = 2
TALL_FROM = 24
"""Lines of a terminal from which the hint may take two of them."""
OTHER_JOBS_CELLS = 44
"""Cells that the figures of a job leave to a line about other jobs."""
DETAIL_CELLS = 46
"""The same for the first part of its detail."""
OFFER_CELLS = 64
"""The same on a wide screen, once the job has ended and jobs of other launchers run there."""
WIDE_TAB_CELLS = 4
TIGHT_TAB_CELLS = 3
"""Cells of a tab besides its name: its key, and two blanks or one before the next tab."""
WIDE_FROM = 110
"""Cells from which the label is `FROZEN PICTURE`: a rank may be frozen, too."""
_RANK = re.compile(r"rank (\d+) ")
"""Beginning of a job's detail that is about the end of a rank."""


class Header(LineView):
    """As many lines as the verdict needs, at least three."""

    def __init__(self, ui: UiState) -> None:
        super().__init__(ui, "masthead")
        self.active = VIEW_NAMES[0]
        self._tab_spans: list[tuple[int, int, str]] = []
        self._num_other_lines = 2
        """Lines besides the verdict and its hint."""
        self._first_text = ""
        """Sentence of the first line."""

    def build(self) -> None:
        """Make the lines and take as much height as they need."""
        tabs, start = self._tabs(), self._start()
        self._num_other_lines = 2 + len(start)
        self.lines = [tabs, *self._verdict(), *start, self._job()]
        if self.styles.height is None or self.styles.height.value != len(self.lines):
            self.styles.height = len(self.lines)

    def on_click(self, event: Click) -> None:
        if event.y:
            return
        for start, stop, name in self._tab_spans:
            if start <= event.x < stop:
                self.app.call_later(self.app.run_action, f"show_view('{name}')")

    def _tabs(self) -> Line:
        palette = self.look.palette
        line = self.line()
        brand, frozen = f" {self.ui.source.title} ", self._frozen()
        width = self.size.width - len(frozen)
        room = width - len(brand) - 1
        # In a replay the title has the time: there the other views' names give way, elsewhere the title does.
        keys = [self.ui.keymap.first(view) or "-" for view in VIEW_NAMES]
        more = sum(map(len, keys)) - len(keys)  # extra cells of keys longer than a digit
        has_brand = self.ui.source.player is not None or _tabs_width(TIGHT_TAB_CELLS) + more < room
        if has_brand:
            line.put(brand, palette.brand).put(" ", palette.bar)
        else:
            room = width
        is_wide = _tabs_width(WIDE_TAB_CELLS) + more <= room
        names = VIEW_NAMES if is_wide else tight_names(self.active, room - more)
        self._tab_spans.clear()
        for key, view, name in zip(keys, VIEW_NAMES, names, strict=True):
            start = line.width
            if view == self.active:
                line.put(f" {key} {name.capitalize()} ", palette.tab)
            else:
                end = " " if is_wide else ""
                line.put(f" {key}", palette.key).put(f" {name.capitalize()}{end}" if name else "", palette.bar_muted)
            self._tab_spans.append((start, line.width, view))
        if frozen:
            line.fit(width, palette.bar)
            line.put(frozen, palette.chosen)
        age_s = None if frozen else self._age_s()
        if age_s is not None:
            age = f"{seconds_cell(age_s)} old"
            style = palette.bar_muted if age_s <= OLD_S else palette.warning + palette.raised
            for text in (f"reports {age}", age):
                if len(text) <= self.size.width - line.width - 2:
                    line.pad(self.size.width - len(text) - 1, palette.bar).put(text, style)
                    break
        return line.fit(self.size.width, palette.bar)

    def _frozen(self) -> str:
        """Return the age of the frozen picture as a label; empty while the picture moves."""
        age_s = self.ui.frozen_s
        if age_s is None:
            return ""
        what = "FROZEN PICTURE" if self.size.width >= WIDE_FROM else "FROZEN"
        return f" {what} {seconds_cell(age_s)} "

    def _age_s(self) -> float | None:
        """Return the age of the oldest of the latest reports; it shows that the picture is live."""
        return self.ui.view.oldest_age_s if self.ui.view is not None else None

    def _verdict(self) -> list[Line]:
        view = self.ui.view
        if self.ui.farewell:
            return self._band(Severity.QUIET, self.ui.farewell, "")
        if view is None:
            return self._band(Severity.QUIET, "waiting for the first report", "")
        if self.ui.opening is not None:
            return self._band(Severity.QUIET, self.ui.opening.text, self._how_to_answer())
        headline: Headline = view.headline()
        verdicts = view.verdicts()
        job = view.job()
        own = self._how_to_begin() if job is None else failure_hint(job)
        hint = verdicts[0].hint if verdicts and headline.severity is not Severity.OK else own
        return self._band(headline.severity, headline.text, self._how_to_answer() or hint)

    def _how_to_answer(self) -> str:
        """Return the hint when a host cannot be reached without the user."""
        questions, key = self.ui.source.questions, self.ui.keymap.first("answer")
        hosts = questions.waiting if questions is not None and key else ()
        return f"{key}: try {nodes_text(hosts)} again, and answer what is asked" if hosts else ""

    def _how_to_begin(self) -> str:
        """Return the hint when all nodes are up and there is no job, nor one that comes by itself."""
        view, source, keymap = self.ui.view, self.ui.source, self.ui.keymap
        if view is None or view.job() is not None:
            return ""
        if source.outside is not None and source.outside.is_shown:
            return keymap.hint("outside", "back")
        if bool((view.node_codes != UP).any()):
            return ""
        if offers := self._offers():
            return offers[0]
        key = keymap.first("start_program") or keymap.first("control")
        by_key = f"{key} starts a program here; or: " if key and source.starter is not None else ""
        return f"{by_key}{source.how_to_begin}" if source.how_to_begin else ""

    def _offers(self) -> list[str]:
        """Return hints on the jobs of other launchers that are known, the longest first; empty while one is shown."""
        outside, keymap = self.ui.source.outside, self.ui.keymap
        if outside is None or outside.is_shown or not outside.offer or not keymap.first("outside"):
            return []
        return [keymap.hint("outside", f"look at {outside.offer}"), keymap.hint("outside", "jobs of other launchers")]

    def _band(self, severity: Severity, text: str, hint: str) -> list[Line]:
        palette, glyphs = self.look.palette, self.look.glyphs
        width, self._first_text = self.size.width, text
        glyph = glyphs.severities[severity]
        if self._is_expecting(severity):
            glyph = glyphs.spinner[self.ui.tick // 2 % len(glyphs.spinner)]
        style = {Severity.CRITICAL: palette.alarm, Severity.WARNING: palette.caution}.get(severity, palette.ink)
        label = f" {glyph} {SEVERITY_TEXTS[severity]}  "
        max_lines = MAX_HINT_LINES if self.app.size.height >= TALL_FROM else 1
        hints = wrapped(self.look.shown(hint), width - len(label) - 1, max_lines, glyphs.ellipsis) if hint else []
        max_lines = self._max_headline_lines(len(hints))
        sentences = wrapped(self.look.shown(text), width - len(label) - 1, max_lines, glyphs.ellipsis)
        label_style = style if severity in {Severity.CRITICAL, Severity.WARNING} else self.look.severity_style(severity)
        lines = []
        for index, sentence in enumerate(sentences):
            line = self.line().put(label if index == 0 else " " * len(label), label_style).put(sentence, style)
            line.fit(width, style)
            lines.append(line)
        for index, piece in enumerate(hints):
            line = self.line().pad(len(label) - 1 - len(glyphs.arrow))
            line.put("" if index else glyphs.arrow, palette.accent).pad(len(label))
            lines.append(line.put(piece, palette.muted))
        return lines

    def _max_headline_lines(self, num_hints: int) -> int:
        """Return how many lines the headline may take: more while the overview below has empty ones."""
        # Both heights are those of the last layout, so that a higher header does not count as less room.
        num_free = cast("PersonalApp", self.app).shown.num_free_lines
        num_lines = self.size.height + num_free - self._num_other_lines - num_hints
        return max(MAX_HEADLINE_LINES, min(MAX_TALL_HEADLINE_LINES, num_lines))

    def _start(self) -> list[Line]:
        """Return the progress of a start, on each node as far as there is room."""
        progress = self.ui.source.starting
        if progress is None:
            return []
        if self.ui.opening is not None:
            return []  # the headline names it, and the overview each node
        palette, width = self.look.palette, self.size.width
        glyph = self.look.glyphs.spinner[self.ui.tick // 2 % len(self.look.glyphs.spinner)]
        content = self.line().put(f" {glyph} ", palette.accent).cell(progress.text, width - 4, palette.ink)
        if len(progress.nodes) < MIN_NODES_SHOWN:
            return [content]
        nodes = in_step_order(progress)
        each = self.line().pad(3)
        for place, node in enumerate(nodes):
            step = progress.stage(node)
            text, more = f"{node} {step}", f"and {len(nodes) - place} more"
            is_last = place == len(nodes) - 1
            if each.width + len(text) + (0 if is_last else len(more) + 3) + 1 > width:
                each.put(more, palette.muted)
                break
            each.put(f"{node} ", palette.strong).put(f"{step}   ", step_style(palette, step))
        return [content, each]

    def _is_expecting(self, severity: Severity) -> bool:
        """Return whether something is still to come, which the spinner shows."""
        if severity is not Severity.QUIET or self.ui.view is None:
            return severity is Severity.QUIET
        job = self.ui.view.job()
        if job is None:
            return bool(self.ui.farewell) or not self._how_to_begin()
        return bool(self.ui.farewell) or (job.exit_code is None and job.state != "ended")

    def _job(self) -> Line:
        line = self.line().pad(1)
        job = self.ui.view.job() if self.ui.view is not None else None
        others = self.ui.view.company_texts if self.ui.view is not None else []
        if job is None:
            room = self.size.width - 2
            content = _longest(others, room) or (self.ui.notices[-1] if self.ui.notices else "")
            return line.cell(content, room, self.look.palette.muted)
        palette = self.look.palette
        if offers := self._offers() if job.state in ENDED_STATES else []:
            others = [f"{offers[0]}; {other}" for other in others[:1]] + offers
        line.put(job.job_id, palette.strong).put("  ")
        line.put(f"{self.look.glyphs.severities[job.severity]} {job.state}", self.look.severity_style(job.severity))
        most = OFFER_CELLS if offers and self.size.width >= WIDE_FROM else OTHER_JOBS_CELLS
        detail = self._detail(job)
        # The figures leave room for what the first line does not have.
        cells = [
            min(max(map(len, others), default=0), most),
            *(min(len(part) + 4, DETAIL_CELLS) for part in detail[:1]),
        ]
        room = self.size.width - max(cells)
        for name, value in _figures(job):
            if line.width + len(name) + len(value) + 4 < room:
                line.put("   ").put(f"{name} ", palette.muted).put(value, palette.ink)
        room = self.size.width - line.width - 4
        control = self.ui.source.control
        doing = control.doing if control is not None else ""
        company = _longest(others, room - len(f"{doing}; ") * bool(doing))
        content = "; ".join(filter(None, (doing, company, *detail, *job.notes)))
        if content and room > 10:
            line.put("   ").cell(content, min(len(content), room), palette.muted)
        return line

    def _detail(self, job: JobRow) -> list[str]:
        """Return the parts of a job's detail that the first line does not have, such as how long a stop takes."""
        first, *rest = job.detail.split("; ")
        if first in self._first_text:
            return []
        verdicts = self.ui.view.verdicts() if self.ui.view is not None else []
        culprits = verdicts[0].culprits if verdicts and verdicts[0].cause in ENDS else []
        failed = _RANK.match(first)
        if failed is None or int(failed[1]) not in culprits or verdicts[0].text not in self._first_text:
            return [first, *rest]
        # The line at which a rank has failed may follow, which says nothing without the rank.
        return [] if job.state in ENDED_STATES else rest


def _longest(texts: Sequence[str], room: int) -> str:
    """Return the first of some texts that fits, else the last; empty without any."""
    return next((text for text in texts if cell_len(text) <= room), texts[-1] if texts else "")


def _tabs_width(cells: int) -> int:
    return sum(len(name) + cells for name in VIEW_NAMES)


def tight_names(active: str, room: int) -> list[str]:
    """Return the names of the views for tabs with one blank between them, cut only as far as necessary.

    The longest names lose their last letters first; that of the active view stays whole.
    """
    names = list(VIEW_NAMES)
    others = [number for number, name in enumerate(names) if name != active]
    width = _tabs_width(TIGHT_TAB_CELLS) + 1
    for _ in range(width - room):
        longest = max(others, key=lambda number: (len(names[number]), number))
        names[longest] = names[longest][:-1]
    return names


def _figures(job: JobRow) -> list[tuple[str, str]]:
    """Return (name, value) pairs, the least important last."""
    figures = []
    if job.exit_code is not None and job.state in {"succeeded", "failed"}:
        figures.append(("exit code", str(job.exit_code)))
    if job.step is not None:
        of = f" of {job.last_step:,}" if job.last_step is not None else ""
        figures.append(("step", f"{job.step:,}{'+' if job.is_step_least else ''}{of}"))
    if job.epoch is not None:
        figures.append(("epoch", str(job.epoch)))
    if job.loss is not None:
        figures.append(("loss", f"{loss_text(job.loss)}{loss_step_text(job.loss_step, job.step)}"))
    if job.steps_per_s is not None:
        figures.append(("steps/s", rate_text(job.steps_per_s)))
    if job.remaining_s is not None:
        figures.append(("left", seconds_text(job.remaining_s)))
    if job.goodput_frac is not None:
        figures.append(("goodput", percent_text(job.goodput_frac)))
    if job.checkpoint_step is not None:
        age = f", {seconds_text(job.checkpoint_age_s)} ago" if job.checkpoint_age_s is not None else ""
        figures.append(("checkpoint", f"{job.checkpoint_step:,}{age}"))
    if job.attempt:
        figures.append(("restart", str(job.attempt)))
    figures.append(("ranks", str(job.world_size)))
    figures.append(("nodes", str(job.num_nodes)))
    return figures
