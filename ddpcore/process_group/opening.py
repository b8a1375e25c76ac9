"""Opens the process group on one rank: checks, store, join check, device, network, and torch's own init.

`Opening` does it with a store. `open_group` opens a group whose ranks MPI has started: there is no store, MPI's runtime
knows rank and world size.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from ddpcore import placement
from ddpcore.barriers.observer import started_ticks, this_machine
from ddpcore.errors import DdpcoreError
from ddpcore.placement import Placement
from ddpcore.process_group.choices import DeviceFacts, backend_names, check_interfaces, choose_device, choose_nic
from ddpcore.process_group.closing import GroupLinks
from ddpcore.process_group.equality import rank_facts
from ddpcore.process_group.join_check import group_prefix, join, publish_failure
from ddpcore.process_group.machine import check_version, gpu_identity, interfaces, own_address, route_to, set_device
from ddpcore.process_group.rank_info import Presence, RankInfo, Seat, local_places
from ddpcore.process_group.rendezvous import open_store

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from ddpcore.process_group.rendezvous_spec import RendezvousSpec

FILE_PATIENCE_S = 5.0
"""Seconds that a file store may wait for a file that was removed; it does so with the interpreter's lock held."""

PUBLISH_S = 3.0
"""Seconds for which a rank that cannot take part tries to reach the others."""

logger = logging.getLogger(__name__)


class Opening:
    """Opening of the group on one rank."""

    def __init__(self, spec: RendezvousSpec, asked: str | None, kind: str, backend: str, facts: DeviceFacts) -> None:
        self._spec = spec
        self._asked = asked
        self._kind = kind
        self.backend = backend
        self._backends = frozenset(backend_names(backend))
        self._facts = facts
        self.device = torch.device("cpu")
        self._network = ""

    def open(self, *, timeout_s: float, join_timeout_s: float, allow_unequal: bool) -> tuple[Placement, GroupLinks]:
        """Return this rank's placement in the open group, and what closing needs; see `open_process_group`."""
        spec = self._spec
        own_info = self._info(allow_unequal=allow_unequal)
        try:
            self._check_before_waiting()
        except DdpcoreError as error:
            self._publish_to_others(own_info, error)
            raise
        store = open_store(spec, join_timeout_s)
        store.set_timeout(timedelta(seconds=FILE_PATIENCE_S if spec.path else join_timeout_s))
        joined = join(store, own_info, spec, timeout_s=join_timeout_s, prepare=self._prepare)
        first_s = min(timeout_s, join_timeout_s)
        store.set_timeout(timedelta(seconds=first_s))
        self._init(joined.group_store, timeout_s, first_s)
        store.set_timeout(timedelta(seconds=timeout_s))
        seat = joined.seat
        where = Placement(spec.rank, spec.world_size, seat.local_rank, seat.local_world_size, seat.node_rank)
        placement.remember(where)
        self._log_opened(where, joined.presence.gpu, joined.differences)
        links = GroupLinks(
            rank=spec.rank,
            world_size=spec.world_size,
            device=self.device,
            backends=self._backends,
            store=PrefixStore(group_prefix(joined.generation), store),
            hosts_store=spec.hosts_store,
        )
        return where, links

    def _check_before_waiting(self) -> None:
        """Refuse what this rank can see to be wrong by itself."""
        local = self._spec.local
        if local.local_rank is not None and local.local_world_size is not None:
            choose_device(self._asked, self._kind, local.local_rank, local.local_world_size, self._facts)
        check_interfaces(os.environ, self._backends, interfaces())
        check_version(self._backends, has_cuda=self._kind == "cuda")

    def _publish_to_others(self, own_info: RankInfo, error: DdpcoreError) -> None:
        """Report to the other ranks not to wait for this one, if they can be reached immediately."""
        with contextlib.suppress(DdpcoreError):
            store = open_store(self._spec, PUBLISH_S)
            store.set_timeout(timedelta(seconds=PUBLISH_S))
            publish_failure(store, own_info, self._spec, error)

    def _info(self, *, allow_unequal: bool) -> RankInfo:
        spec, facts, pid = self._spec, rank_facts(self._backends, os.environ), os.getpid()
        return RankInfo(
            rank=spec.rank,
            world_size=spec.world_size,
            host=socket.gethostname(),
            pid=pid,
            machine=this_machine(),
            started_ticks=started_ticks(pid),
            joined_at=datetime.now(UTC).strftime("at %Y-%m-%d %H:%M:%S UTC"),
            address=own_address(spec.master_addr),
            backend=self.backend,
            local_rank=spec.local.local_rank,
            local_world_size=spec.local.local_world_size,
            node_rank=spec.local.node_rank,
            strict=facts.strict,
            soft=facts.soft,
            allows_unequal=allow_unequal,
        )

    def _prepare(self, seat: Seat) -> Presence:
        """Set device and network interface, now that the ranks of this node are known."""
        choice = choose_device(self._asked, self._kind, seat.local_rank, seat.local_world_size, self._facts)
        self.device = set_device(str(choice))
        self._choose_network(seat)
        is_exclusive = "nccl" in self._backends and os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE", "0") == "0"
        return Presence(gpu=gpu_identity(self.device) if is_exclusive else "")

    def _choose_network(self, seat: Seat) -> None:
        route = route_to(self._spec.master_addr or "127.0.0.1")
        if seat.num_machines > 1 and (route is None or route.is_loopback) and seat.peer_address:
            route = route_to(seat.peer_address) or route
        choice = choose_nic(route, self._backends, os.environ, seat.num_machines)
        os.environ.update(choice.environment)
        self._network = choice.line
        if choice.hint:
            logger.warning("rank %d: %s", self._spec.rank, choice.hint)

    def _init(self, store: Store, timeout_s: float, init_timeout_s: float) -> None:
        set_timeout = getattr(dist.distributed_c10d, "_set_pg_timeout", None)
        first_s = init_timeout_s if set_timeout is not None else timeout_s
        try:
            dist.init_process_group(
                self.backend,
                store=store,
                rank=self._spec.rank,
                world_size=self._spec.world_size,
                timeout=timedelta(seconds=first_s),
                device_id=self.device if self.device.type != "cpu" else None,
            )
        except (RuntimeError, ValueError) as error:
            error.add_note(
                f"rank {self._spec.rank} on {socket.gethostname()}, {self._network or 'no interface chosen'}"
            )
            raise
        if set_timeout is not None and first_s != timeout_s:
            set_timeout(timedelta(seconds=timeout_s))

    def _log_opened(self, where: Placement, gpu: str, differences: list[str]) -> None:
        for difference in differences:
            logger.warning("the ranks are not quite equal: %s", difference)
        logger.info(
            "rank %d of %d (local %d of %d, node %d) on %s: %s%s, %s, met at %s%s",
            *where,
            socket.gethostname(),
            self.device,
            f" ({gpu})" if gpu else "",
            self.backend,
            self._spec.where,
            f"; {self._network}" if self._network else "",
        )


def open_group(backend: str, timeout_s: float) -> Placement:
    """Open the default group with all ranks of mpirun, and place this one; blocks."""
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))
    rank, world_size = dist.get_rank(), dist.get_world_size()
    nodes: list[str | None] = [None] * world_size
    dist.all_gather_object(nodes, f"{socket.gethostname()} {this_machine().partition(' ')[0]}")
    return Placement(rank, world_size, *local_places(cast("list[str]", nodes))[rank])
