"""A random walk of faults over hosts with a job, a console and a relay: `python -m tests.fault.nemesis --seed 7`.

    --seed N      the dice; printed, so that a walk can be walked again     --minutes M   for how long
    --hosts N     at least 2                                                 --logs DIR    where logs are left

Each round picks one fault, at times two, waits a while, heals, waits until all is green, and checks I1 to I8
(`tests.support.invariants`). The first broken invariant ends the walk: it is said after which faults, the logs stay.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import math
import os
import random
import shutil
import signal
import sys
import time
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Unpack

from app.errors import UsageError
from app.fleet.host_link import Access, HostLink
from app.session.remote_session import RemoteSession
from tests.support.hosts import Network
from tests.support.invariants import Training, broken_events
from tests.support.light_job import LightJob
from tests.support.plain_hosts import these
from tests.support.relays import MergedReader, RunningRelay
from tests.support.waiting import until_async
from tests.support.watch import SSHD, Watch

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.hosts import Host
    from tests.support.poor_link import Quality

HELD_S = (0.5, 12.0)
GREEN_S = 90.0
TWO_FRAC = 0.25
RELAY_AGE_S = 2.0
ROOT = Path(__file__).parents[2]


class Fault(NamedTuple):
    """What is done to a host, or to the relay, and how it is undone.

    Attributes:
        ends_rank: Whether it ends the host's rank: then the job is restarted afterwards.
    """

    name: str
    inject: Callable[[Nemesis, Host], None]
    heal: Callable[[Nemesis, Host], None]
    ends_rank: bool = False


def _link(**quality: Unpack[Quality]) -> Callable[[Nemesis, Host], None]:
    def change(_: Nemesis, host: Host) -> None:
        assert host.link is not None
        host.link.become(**quality)

    return change


def _signal_agent(number: signal.Signals) -> Callable[[Nemesis, Host], None]:
    def send(nemesis: Nemesis, host: Host) -> None:
        place = nemesis.watch.links[host.name].place
        assert place is not None
        host.exec("kill", f"-{int(number)}", str(place.pid))

    return send


def _signal_job(number: signal.Signals, *, is_rank: bool) -> Callable[[Nemesis, Host], None]:
    def send(nemesis: Nemesis, host: Host) -> None:
        for one in nemesis.watch.job.processes([host]):
            is_shim = one.rank is None and any("shim" in word for word in one.process.cmdline())
            if (one.rank is not None) if is_rank else is_shim:
                one.process.send_signal(number)

    return send


def _nothing(_nemesis: Nemesis, _host: Host) -> None:
    return


FAULTS = (
    Fault("a silent cut", lambda _, host: host.pull_cable(), lambda _, host: host.plug_in_cable()),
    Fault("no carrier", lambda _, host: host.take_link_down(), lambda _, host: host.bring_link_up()),
    Fault("nothing is heard of it", _link(is_mute=True), _link()),
    Fault("nothing reaches it", _link(is_deaf=True), _link()),
    Fault("loss and jitter", _link(lost_frac=0.05, jitter_s=0.05), _link()),
    Fault("1 Mbit/s", _link(bytes_s=125_000), _link()),
    Fault("it stands still", lambda _, host: host.freeze(), lambda _, host: host.thaw()),
    Fault("its agent is killed", _signal_agent(signal.SIGKILL), lambda nemesis, host: nemesis.bring_up(host.name)),
    Fault("its agent is stopped", _signal_agent(signal.SIGSTOP), _signal_agent(signal.SIGCONT)),
    Fault("its shim is killed", _signal_job(signal.SIGKILL, is_rank=False), _nothing),
    Fault("its rank is stopped", _signal_job(signal.SIGSTOP, is_rank=True), _signal_job(signal.SIGCONT, is_rank=True)),
    Fault("its rank is killed", _signal_job(signal.SIGKILL, is_rank=True), _nothing, ends_rank=True),
    Fault("its SSH sessions are killed", lambda _, host: host.drop_sessions(), _nothing),
    Fault("sshd no longer listens", lambda _, host: host.stop_sshd(), lambda _, host: host.start_sshd()),
    Fault("sshd forbids forwarding", lambda _, host: host.forbid_forwarding(), lambda _, host: host.allow_forwarding()),
    Fault("a power cut", lambda _, host: host.cut_power(), lambda nemesis, host: nemesis.boot(host), ends_rank=True),
    Fault(
        "the relay is killed", lambda nemesis, _: nemesis.relay.kill(), lambda nemesis, _: nemesis.relay.begin_again()
    ),
    Fault(
        "the relay stands still",
        lambda nemesis, _: nemesis.relay.process.send_signal(signal.SIGSTOP),
        lambda nemesis, _: nemesis.relay.process.send_signal(signal.SIGCONT),
    ),
)


class Nemesis:
    """A walk.

    Attributes:
        watch: The console and the job.
        relay: Dialled by all agents.
        told: Faults so far, each with its times.
    """

    watch: Watch
    relay: RunningRelay

    def __init__(self, network: Network, relay: RunningRelay, seed: int) -> None:
        self.network = network
        self.relay = relay
        self.told: list[str] = []
        self.num_rounds = self.num_restarts = 0
        self.longest_green_s = 0.0
        self._dice = random.Random(seed)
        self._began_s = time.monotonic()

    def say(self, text: str) -> None:
        self.told.append(f"{time.monotonic() - self._began_s:7.1f} s  {text}")
        sys.stdout.write(self.told[-1] + "\n")
        sys.stdout.flush()

    def bring_up(self, name: str) -> None:
        """Start the agent of a host, which dials the relay, unless it serves already."""
        with HostLink(Access(name, sys.executable, str(self.network.ssh_config))) as link:
            link.connect()
            place = link._ask_place("serve", "--daemon", "--relay", str(self.relay.invitation))
            if hasattr(self, "watch"):
                self.watch.links[name].place = place

    def boot(self, host: Host) -> None:
        host.boot()
        self.bring_up(host.name)

    async def walk(self, seconds: float) -> None:
        """Walk until the time is over.

        Raises:
            AssertionError: An invariant is broken.
        """
        names = list(self.network.hosts)
        async with AsyncExitStack() as stack:
            await asyncio.gather(*(asyncio.to_thread(self.bring_up, name) for name in names))
            config = str(self.network.ssh_config)
            links = {name: stack.enter_context(HostLink(Access(name, sys.executable, config))) for name in names}
            for link in links.values():
                await asyncio.to_thread(link.connect)
                await asyncio.to_thread(link.find)
            session = RemoteSession(these(*links.values()))
            session.patience_s, session.backfills = math.inf, True
            await session.start()
            stack.push_async_callback(session.close)
            self.watch = Watch(self.network, session, links, LightJob(self.network.directory))
            stack.push_async_callback(self.watch.close)
            await self.watch.begin()
            self.say(f"job, console and relay run over {len(names)} hosts")
            until_s = time.monotonic() + seconds
            while time.monotonic() < until_s:
                await self._round()
            await self.watch.finish()

    async def _round(self) -> None:
        num = 2 if self._dice.random() < TWO_FRAC else 1
        hosts = self._dice.sample(list(self.network.hosts.values()), num)
        faults = self._dice.sample(FAULTS, num)
        for fault, host in zip(faults, hosts, strict=True):
            self.say(f"{host.name}: {fault.name}")
            await self.watch.do(fault.inject, self, host)
        await asyncio.sleep(self._dice.uniform(*HELD_S))  # the fault's own time
        for fault, host in zip(faults, hosts, strict=True):
            await self.watch.do(fault.heal, self, host)
        self.say("healed")
        took_s = await self.watch.until_green(GREEN_S)
        self.longest_green_s = max(self.longest_green_s, took_s)
        ended = {
            number
            for number, name in enumerate(self.network.hosts)
            for fault, host in zip(faults, hosts, strict=True)
            if fault.ends_rank and host.name == name
        }
        self._check(await self.watch.do(lambda: self.watch.training.broken(without=ended)))
        await self.watch.do(self.watch.invariants.look_at_jobs, self.watch.hosts, self.watch.job)
        self._check([*self.watch.invariants.broken, *broken_events([*self.watch.session.events.latest_first()][::-1])])
        await self._look_through_the_relay()
        if ended or any("shim" in fault.name for fault in faults):
            await self._restart()
        self.num_rounds += 1
        self.say(f"green after {took_s:.1f} s")

    def _check(self, broken: list[str]) -> None:
        assert not broken, "\n".join(broken)

    async def _look_through_the_relay(self) -> None:
        """I8 of the relay's consoles: all nodes are there, and fresh."""
        names = set(self.network.hosts)
        with MergedReader(self.relay.directory) as reader:

            def is_green() -> bool:
                fresh = {node for node, (_, age_s) in list(reader.newest.items()) if age_s < RELAY_AGE_S}
                return reader.is_whole and reader.here == names == fresh

            await until_async(is_green, GREEN_S, "I8: all is green through the relay")

    async def _restart(self) -> None:
        """Begin the next attempt of the job, as a user does; no process of the one before it is left (I2)."""
        before = {one.process for one in await self.watch.do(self.watch.job.processes, self.watch.hosts)}
        deadline_s = time.monotonic() + GREEN_S
        while True:
            try:
                await self.watch.session.job_control.restart(self.watch.job.job_id, is_immediate=True)
                break
            except UsageError:  # a connection is being made again: a node cannot be asked yet
                if time.monotonic() > deadline_s:
                    raise
            await asyncio.sleep(0.5)
        self.num_restarts += 1
        number = len(self.network.hosts)

        async def ranks() -> int:
            found = await self.watch.do(self.watch.job.processes, self.watch.hosts)
            return len({one.rank for one in found if one.process not in before and one.rank is not None})

        for _ in range(int(GREEN_S)):
            if await ranks() == number:
                break
            await asyncio.sleep(0.5)
        left = {one.process for one in await self.watch.do(self.watch.job.processes, self.watch.hosts)} & before
        self._check([f"I2: {process} of the attempt before is left" for process in left])
        await self.watch.until_green(GREEN_S)
        self.watch.training = await self.watch.do(Training, self.watch.job, self.watch.hosts)


def walk(seed: int, seconds: float, num_hosts: int, logs: Path) -> Nemesis:
    """Walk; where an invariant breaks, leave the logs and raise."""
    sys.stdout.write(f"nemesis: seed {seed}, {seconds:.0f} s, {num_hosts} hosts\n")
    names = [f"h{number}" for number in range(1, num_hosts + 1)]
    with ExitStack() as stack:
        network = stack.enter_context(Network(*names, sshd_options=SSHD, has_poor_links=True))
        relay = stack.enter_context(RunningRelay("--listen", f"{network.subnet}.1"))
        nemesis = Nemesis(network, relay, seed)
        try:
            asyncio.run(nemesis.walk(seconds))
        except BaseException:
            _keep_logs(nemesis, logs)
            raise
    nemesis.say(
        f"{nemesis.num_rounds} rounds, {nemesis.num_restarts} restarts; green after at most "
        f"{nemesis.longest_green_s:.1f} s; a frame came at most {nemesis.watch.invariants.longest_lag_s:.2f} s late; "
        f"{nemesis.watch.invariants.num_ages} ages within {nemesis.watch.invariants.freshest_s:.2f} s"
    )
    return nemesis


def _keep_logs(nemesis: Nemesis, logs: Path) -> None:
    logs.mkdir(parents=True, exist_ok=True)
    lines = list(nemesis.told)
    if hasattr(nemesis, "watch"):
        events = nemesis.watch.session.events.latest_first()
        lines += ["", *nemesis.watch.said, "", *(f"{event.at_s:.2f} {event.text}" for event in [*events][::-1])]
        lines += ["", nemesis.watch.headline, *map(str, nemesis.watch.rows.values())]
    (logs / "nemesis.log").write_text("\n".join(lines) + "\n")
    for path in [*nemesis.network.directory.rglob("*.log"), *nemesis.network.directory.rglob("*.json*")]:
        with contextlib.suppress(OSError):
            name = "_".join(path.relative_to(nemesis.network.directory).parts)
            shutil.copy(path, logs / name)
    with contextlib.suppress(OSError):
        (logs / "relay.log").write_text(nemesis.relay.said())
    sys.stdout.write(f"nemesis: the logs are in {logs}\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(3), "big"))
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--logs", type=Path, default=ROOT / "build" / "nemesis")
    given = parser.parse_args()
    walk(given.seed, 60 * given.minutes, given.hosts, given.logs / str(given.seed))


if __name__ == "__main__":
    main()
