"""What a node reports, and the commands it takes: the vocabulary between an agent and its consoles.

Telemetry: `reports`, with `jobs`, `machine` and `logs` in them, one msgpack frame each. Commands and their replies:
`commands`, one JSON line in, one JSON line out, on the agent's Unix command socket. Log lines do not fit in a snapshot:
a report carries the number of the latest (`log_seq`), and a console pulls newer ones by `PullLogs`, what is older by
`ReadLog`.
"""
