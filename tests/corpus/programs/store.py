"""A store of samples: takes bytes of ranks by TCP, and answers each sample with a byte.

python store.py ADDRESS FILE, which it makes once it listens
"""

from __future__ import annotations

import socket
import socketserver
import sys
from pathlib import Path

SAMPLE_BYTES = 64 * 1024


class Rank(socketserver.BaseRequestHandler):
    """A connection of a rank."""

    def handle(self) -> None:
        while len(self.request.recv(SAMPLE_BYTES, socket.MSG_WAITALL)) == SAMPLE_BYTES:
            self.request.sendall(b"1")


with socketserver.ThreadingTCPServer((sys.argv[1], 0), Rank) as server:
    unfinished = Path(f"{sys.argv[2]}.tmp")
    unfinished.write_text(f"{sys.argv[1]} {server.server_address[1]}")
    unfinished.rename(sys.argv[2])
    server.serve_forever()
