"""The console on a simulated training, in whatever terminal this is: python -m tests.support.sim_console."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from app.tui import rendering
from app.tui.console import Console
from tests.support.consoles import FRAME_S, TalkingSource
from tests.support.sim import SimCluster

if TYPE_CHECKING:
    from app.view.view import View


class RunningSource(TalkingSource):
    """Simulated time passes with every look at it."""

    def view(self) -> View:
        self.run(2 * FRAME_S)
        return super().view()


if __name__ == "__main__":
    rendering.LAST_ANSWER_S = float(os.environ.get("SIM_LAST_ANSWER_S", rendering.LAST_ANSWER_S))
    simulation = SimCluster()
    simulation.run_to_step(3)
    Console(RunningSource(simulation)).run()
