"""A recording folded into the model again, up to any moment of it. Pure: whoever plays it says how far.

The model is looked at as often as a live console looks, so that what needs time to be said is said at the same moment.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from agent.wire.codec import MalformedMessageError
from agent.wire.digest import decode_frame
from app.recording.lookout import Lookout
from app.recording.records import LinesHeard, NoticeHeard, ReportHeard, StacksHeard
from app.safe_text import LINE_LIMIT, clean
from app.stacks.groups import NodeStacks

if TYPE_CHECKING:
    from agent.wire.logs import LogLine
    from app.diagnosis.rank_facts import Thresholds
    from app.diagnosis.verdicts import Verdict
    from app.event_log import EventLog
    from app.history import History
    from app.recording.records import Record, Recording
    from app.view import View

LOOK_S = 0.2
"""Between two looks at the model, as in a console."""
BEGIN_S = 1_000.0
"""The model's clock at the recording's begin: not zero, which would be before all ages."""


class Playback:
    """A recording at one moment of it.

    Attributes:
        at_s: Behind the recording's begin.
        length_s: Of the recording.
        num_malformed: Reports in it that could not be decoded.
    """

    def __init__(self, recording: Recording, thresholds: Thresholds) -> None:
        self.length_s = recording.length_s
        self._recording = recording
        self._thresholds = thresholds
        self.begin()

    def begin(self) -> None:
        """Go back to the begin."""
        self.at_s = 0.0
        self.num_malformed = 0
        self._num_taken = 0
        opening = self._recording.opening
        self._lookout = Lookout(opening.nodes, self._thresholds, job_id=opening.job_id)
        self._lines: list[tuple[str, LogLine]] = []
        self._notices: list[str] = []
        self._lookout.look(BEGIN_S)

    @property
    def events(self) -> EventLog:
        """What has happened up to this moment, in the model's clock."""
        return self._lookout.events

    @property
    def history(self) -> History:
        """How figures went up to this moment, in the model's clock."""
        return self._lookout.history

    @property
    def is_over(self) -> bool:
        """True at the end."""
        return self.at_s >= self.length_s

    def step(self, to_s: float) -> None:
        """Go on by one look at the model, at most to `to_s` and to the end."""
        self.at_s = max(self.at_s, min(self.at_s + LOOK_S, to_s, self.length_s))
        records = self._recording.records
        while self._num_taken < len(records) and records[self._num_taken].at_s <= self.at_s:
            self._take(records[self._num_taken])
            self._num_taken += 1
        self._lookout.look(BEGIN_S + self.at_s)

    def view(self) -> View:
        """Return the rows of this moment."""
        return self._lookout.view()

    @property
    def verdicts(self) -> list[Verdict]:
        """What is said at this moment, the worst first."""
        return self._lookout.verdicts

    def nearest_stacks(self) -> tuple[list[NodeStacks], float]:
        """Return the newest stacks up to this moment, else the first ones after it, and when they were taken."""
        taken = [record for record in self._recording.records if isinstance(record, StacksHeard)]
        past = [record.at_s for record in taken if record.at_s <= self.at_s]
        at_s = past[-1] if past else taken[0].at_s if taken else 0.0
        return [answer_of(record) for record in taken if record.at_s == at_s], at_s

    def drain_logs(self) -> list[tuple[str, LogLine]]:
        """Return the (node, line) pairs since the last call."""
        lines, self._lines = self._lines, []
        return lines

    def drain_notices(self) -> list[str]:
        """Return the sentences since the last call."""
        notices, self._notices = self._notices, []
        return notices

    def _take(self, record: Record) -> None:
        match record:
            case ReportHeard(node=node):
                try:
                    frame = decode_frame(record.frame)
                except MalformedMessageError:
                    self.num_malformed += 1
                    return
                self._lookout.hear(node, frame, BEGIN_S + record.at_s)
            case LinesHeard():
                self._lines += ((record.node, line) for line in record.lines)
            case StacksHeard():
                pass  # shown when they are asked for
            case NoticeHeard():
                self._notices.append(clean(record.text, LINE_LIMIT))
                self.events.tell(record.text, BEGIN_S + record.at_s)


def answer_of(record: StacksHeard) -> NodeStacks:
    """Return stacks as a node's answer; what a recording says of trouble is hostile until here."""
    return NodeStacks(record.node, record.stacks, clean(record.trouble, LINE_LIMIT))
