"""Bounded types of fields, and the names of an agent's sockets."""

from __future__ import annotations

from typing import Annotated

import msgspec

LongText = Annotated[str, msgspec.Meta(max_length=4096)]


JobId = Annotated[str, msgspec.Meta(pattern=r"^[a-z0-9][a-z0-9-]{0,63}\Z")]


Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]


PublicKey = Annotated[str, msgspec.Meta(pattern=r"^[0-9A-Za-z.:+=^!/*?&<>()\[\]{}@%$#-]{40}\Z")]
"""Of CURVE, in Z85. Source: RFC 32."""


LOSS_METRIC = "loss"
STEP_METRIC = "step"
EPOCH_METRIC = "epoch"
"""Metrics read from lines that stand for what a rank has not reported itself."""


TELEMETRY_SOCKET = "telemetry.sock"
"""Reports as they are made, for ZeroMQ on this machine."""


REPORTS_SOCKET = "reports.sock"
"""The newest report, for the asking, as `agent.wire.merged` has it: for whoever is away."""


CONTROL_SOCKET = "control.sock"


INBOX_SOCKET = "inbox.sock"
"""Names of an agent's sockets in its 0700 directory."""
