"""Several machines find each other on the job's storage, measure the ways between them, and tell.

    preflight/here/NODE.json             a number that goes on while the machine is there
    preflight/round-000001/members.json  who takes part; put if absent, so that one proposal counts
    preflight/round-000001/NODE.json     what each of them reports

No machine is special: each puts its report, waits for the others', and concludes for itself from
all of them. A machine that comes when the job runs already measures itself against the reports of
the last round, and waits for nobody.

One that was killed leaves its number behind, which stands still: the next one removes it.

What can go wrong: machines do not see the same storage (nobody comes: said after the time that was
given); one dies half way (its number stands still: the others go on without its report).
Rejected: a machine that leads (it would be the one that must not be sick).
"""

from __future__ import annotations

import contextlib
import functools
import json
import re
import socket
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import msgspec

from outlast import peer
from outlast.errors import OutlastError, SealError
from outlast.peer.claims import FOLDER
from outlast.policy.fitness_peers import Company, MachineReport, PeerLink
from outlast.storage import Directory, Storage, open_storage

PURPOSE: Final = "doctor"
PLACE: Final = "preflight"
LOOK_S: Final = {True: 0.25, False: 1.0}  # at a directory, at a bucket
REACH_S: Final = 5.0
PINGS: Final = 10
STREAM_S: Final = 0.4
STREAM_BYTES: Final = (4 << 20, 64 << 20)
REPORTS_S: Final = 300.0
ROUNDS_KEPT: Final = 2
DEAD_S: Final = 5.0  # without going on: ten times as long as one that lives takes
MEETERS_MAX: Final = 256  # connections that are served at once
_ROUND: Final = re.compile(r"round-(\d{6})\Z")


class Here(msgspec.Struct, kw_only=True):
    """A machine's sign that it is there; ``here/NODE.json``."""

    node: str
    machine: str
    address: tuple[str, int]
    count: int = 0


class MeetingRound(msgspec.Struct, frozen=True, kw_only=True):
    """Who takes part in a round of the meeting."""

    members: list[Here]


class Met(msgspec.Struct, frozen=True, kw_only=True):
    """What the meeting's process says last.

    Attributes:
        outcome: "met", "alone" (not enough came), "joins" (the job runs already), "failed".
        reports: of all that reported.
        missing: node → name of those that did not.
        words: what is to be said about it.
    """

    outcome: str
    reports: list[MachineReport] = []
    missing: dict[str, str] = {}
    words: str = ""


def probe(
    *,
    place: str,
    node: str,
    machine: str,
    host: str,
    nodes: tuple[int, int],
    wait_s: float,
    tls: list[str] | None,
    say: Callable[[object], None],
) -> None:
    """Meet the others; reads this machine's report from standard input when it comes.

    Args:
        place: the directory or bucket that all of them see.
        node: a name that no other has.
        machine: its name for people.
        host: the address that others reach it at.
        nodes: the fewest and the most machines.
        wait_s: for enough of them to come.
        tls: files of certificate, key and authority (:func:`files_of`), or None.
        say: told what is waited for, as {"waits": words}, and at the end the ``Met``.
    """
    meeting = None
    try:
        meeting = DoctorMeeting(place, node, machine, host, _tls(tls))
        say(meeting.meet(nodes, wait_s, lambda words: say({"waits": words})))
    except (OutlastError, OSError) as error:
        words = getattr(error, "strerror", None) or str(error)
        say(Met(outcome="failed", words=f"the machines cannot meet on {place}: {words}"))
    finally:
        if meeting is not None:
            meeting.close()


def files_of(tls: peer.Tls | None) -> list[str] | None:
    """The files of ``[peer]`` as JSON can hold them."""
    return None if tls is None else list(tls.files)


def _tls(files: list[str] | None) -> peer.Tls | None:
    if files is None:
        return None
    cert, key, ca = map(Path, files)
    return peer.Tls(cert=cert, key=key, ca=ca)


class DoctorMeeting:
    """One machine at the meeting."""

    def __init__(
        self, place: str, node: str, machine: str, host: str, tls: peer.Tls | None
    ) -> None:
        self._storage: Storage = open_storage(place)
        self._place = place
        self._look_s = LOOK_S[isinstance(self._storage, Directory)]
        self._key = peer.job_key(self._storage)
        self._tls = tls
        self._listener = peer.listen(host)
        port = self._listener.getsockname()[1]
        self._me = Here(node=node, machine=machine, address=(host, port))
        # node → its number when first seen, and when
        self._first: dict[str, tuple[int, float]] = {}
        self._over = threading.Event()
        self._threads = [
            threading.Thread(target=self._serve, name="outlast-doctor-serve", daemon=True),
            threading.Thread(target=self._count, name="outlast-doctor-here", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def meet(self, nodes: tuple[int, int], wait_s: float, say: Callable[[str], None]) -> Met:
        """Find the others, and compare."""
        company = Company(self._me.node, *nodes)
        found = self._gather(company, nodes, wait_s, say)
        report = msgspec.convert(json.loads(sys.stdin.readline()), MachineReport)
        if isinstance(found, str):
            others_were = self._last_reports() if found == "joins" else []
            return Met(outcome=found, reports=[*others_were, report])
        number, members = found
        others = [one for one in members if one.node != self._me.node]
        report = msgspec.structs.replace(report, links=self._links(members, others))
        self._storage.put(
            f"{PLACE}/{round_name(number)}/{self._me.node}.json", msgspec.json.encode(report)
        )
        reports = self._reports(number, others, company, say)
        missing = {one.node: one.machine for one in others if one.node not in reports}
        return Met(outcome="met", reports=[report, *reports.values()], missing=missing)

    def close(self) -> None:
        """Leave: nothing of this machine is there any more but its report."""
        self._over.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join(self._look_s + 1)
        with contextlib.suppress(OSError):
            self._storage.remove(f"{PLACE}/here/{self._me.node}.json")
            self._sweep()

    def _sweep(self) -> None:
        """Remove what doctors left that were killed; one that lives writes its own anew."""
        now_s = time.monotonic()
        for one in self._here().values():
            count, seen_s = self._first.get(one.node, (-1, now_s))
            if one.node != self._me.node and one.count == count and now_s - seen_s >= DEAD_S:
                with contextlib.suppress(FileNotFoundError):
                    self._storage.remove(f"{PLACE}/here/{one.node}.json")

    # --- finding each other --------------------------------------------------------------------

    def _gather(
        self,
        company: Company,
        nodes: tuple[int, int],
        wait_s: float,
        say: Callable[[str], None],
    ) -> tuple[int, list[Here]] | str:
        """The round's number and members, or how it is otherwise: "alone", "joins"."""
        until_s, said = time.monotonic() + wait_s, ""
        alive: bytes | None = None
        known = max(self._rounds(), default=0)
        while True:
            here = self._here()
            now_s = time.monotonic()
            company.seen({one.node: one.count for one in here.values()}, now_s)
            for number in [one for one in self._rounds() if one > known]:
                members = self._members(number)
                if not members:  # its folder is there a moment before what it says
                    break
                if any(one.node == self._me.node for one in members):
                    return number, members
                company.taken(one.node for one in members)
                known = number
            before, alive = alive, self._alive() or alive
            if before is not None and alive != before:
                return "joins"  # the coordinator's sign of life goes on
            proposed = company.proposal(now_s)
            if proposed and all(node in here for node in proposed):
                wanted = MeetingRound(members=[here[node] for node in proposed])
                name = f"{PLACE}/{round_name(known + 1)}/members.json"
                self._storage.put_new(name, msgspec.json.encode(wanted))
                self._forget_old(known + 1)
                continue
            present = company.present(now_s)
            if now_s > until_s and len(present) < nodes[0]:
                return "alone"
            words = f"{max(nodes[0] - len(present), 0)} more machines on {self._place}"
            if len(present) < nodes[0] and words != said:
                said = words
                say(words)
            time.sleep(self._look_s)

    def _here(self) -> dict[str, Here]:
        found = {self._me.node: self._me}
        for name in self._storage.children(f"{PLACE}/here"):
            with contextlib.suppress(FileNotFoundError, msgspec.MsgspecError):
                one = msgspec.json.decode(self._storage.read(f"{PLACE}/here/{name}"), type=Here)
                found[one.node] = one
                self._first.setdefault(one.node, (one.count, time.monotonic()))
        return found

    def _rounds(self) -> list[int]:
        matches = (_ROUND.match(name) for name in self._storage.children(PLACE))
        return sorted(int(match[1]) for match in matches if match)

    def _members(self, number: int) -> list[Here]:
        name = f"{PLACE}/{round_name(number)}/members.json"
        with contextlib.suppress(FileNotFoundError, msgspec.MsgspecError):
            return msgspec.json.decode(self._storage.read(name), type=MeetingRound).members
        return []

    def _alive(self) -> bytes | None:
        """The sign of life of whoever coordinates the job; None where nobody does."""
        with contextlib.suppress(FileNotFoundError, ValueError):
            data = self._storage.read(f"{FOLDER}/alive.json")
            return None if json.loads(data).get("over") else data
        return None

    def _forget_old(self, newest: int) -> None:
        with contextlib.suppress(OSError):
            for number in self._rounds():
                if number <= newest - ROUNDS_KEPT:
                    self._storage.remove_tree(f"{PLACE}/{round_name(number)}")

    def _count(self) -> None:
        """Be seen, until it is over; what fails once is tried again."""
        while not self._over.is_set():
            self._me.count += 1
            with contextlib.suppress(OSError):
                data = msgspec.json.encode(self._me)
                self._storage.put(f"{PLACE}/here/{self._me.node}.json", data)
            self._over.wait(2 * self._look_s)

    # --- reports -------------------------------------------------------------------------------

    def _reports(
        self, number: int, others: list[Here], company: Company, say: Callable[[str], None]
    ) -> dict[str, MachineReport]:
        """Node → what it reports; without those that are gone, or too late."""
        until_s = time.monotonic() + REPORTS_S
        found: dict[str, MachineReport] = {}
        said = ""
        while True:
            here = self._here()
            now_s = time.monotonic()
            company.seen({one.node: one.count for one in here.values()}, now_s)
            waits = [one for one in others if one.node not in found]
            for one in waits:
                report = self._report(number, f"{one.node}.json")
                if report is not None:
                    found[one.node] = report
            waits = [one for one in waits if one.node not in found]
            gone = [one for one in waits if company.is_gone(one.node, now_s)]
            if len(gone) == len(waits) or now_s > until_s:
                return found
            words = "the report of " + ", ".join(one.machine for one in waits)
            if words != said:
                said = words
                say(words)
            time.sleep(self._look_s)

    def _report(self, number: int, name: str) -> MachineReport | None:
        with contextlib.suppress(FileNotFoundError, msgspec.MsgspecError):
            data = self._storage.read(f"{PLACE}/{round_name(number)}/{name}")
            return msgspec.json.decode(data, type=MachineReport)
        return None

    def _last_reports(self) -> list[MachineReport]:
        """Of the last round, of machines that were found fit by themselves."""
        number = max(self._rounds(), default=0)
        names = self._storage.children(f"{PLACE}/{round_name(number)}") if number else []
        found = [self._report(number, name) for name in names if name != "members.json"]
        return [
            msgspec.structs.replace(one, links={})
            for one in found
            if one is not None and not one.failed
        ]

    # --- the ways between them -----------------------------------------------------------------

    def _links(self, members: list[Here], others: list[Here]) -> dict[str, PeerLink]:
        if not others:
            return {}
        names = [one.node for one in members]
        behind = members[(names.index(self._me.node) + 1) % len(members)]
        with ThreadPoolExecutor(16, "outlast-doctor-link") as pool:
            links = pool.map(lambda one: self._link(one, streams=one.node == behind.node), others)
            return {one.node: link for one, link in zip(others, links, strict=True)}

    def _link(self, other: Here, *, streams: bool) -> PeerLink:
        try:
            with contextlib.closing(
                peer.connect(
                    other.address, self._key, PURPOSE, REACH_S, silence_s=REACH_S, tls=self._tls
                )
            ) as channel:
                offset_s, bound_s = min(
                    (self._ping(channel) for _ in range(PINGS)), key=lambda one: one[1]
                )
                rate_bytes = self._stream(channel) if streams else None
                return PeerLink(offset_s=offset_s, bound_s=bound_s, rate_bytes=rate_bytes)
        except SealError as error:
            return PeerLink(error=error.reason)
        except TimeoutError:
            return PeerLink(error=f"no answer within {REACH_S:.0f} s")
        except OSError as error:
            return PeerLink(error=(error.strerror or str(error) or "no connection").lower())

    @staticmethod
    def _ping(channel: peer.Channel) -> tuple[float, float]:
        """How far its clock is ahead, and by how much that may be off; as NTP reckons it."""
        sent_t, begun_s = time.time(), time.perf_counter()
        channel.send(b"clock")
        answer = channel.receive(REACH_S)
        took_s = time.perf_counter() - begun_s
        if answer is None:
            raise ConnectionResetError("the connection was closed")
        return float(answer) - (sent_t + took_s / 2), took_s / 2

    @staticmethod
    def _stream(channel: peer.Channel) -> float:
        rate = 0.0
        for size in STREAM_BYTES:
            data = memoryview(bytearray(size))
            begun_s = time.perf_counter()
            channel.send(b"bulk", [data])
            channel.receive(REACH_S * 4)
            took_s = time.perf_counter() - begun_s
            rate = size / took_s
            if took_s > STREAM_S / 4:
                break
        return rate

    def _serve(self) -> None:
        with ThreadPoolExecutor(MEETERS_MAX, "outlast-doctor-met") as pool:
            while not self._over.is_set():
                try:
                    sock, _ = self._listener.accept()
                except OSError:
                    return
                pool.submit(functools.partial(self._answer, sock))

    def _answer(self, sock: socket.socket) -> None:
        with (
            contextlib.suppress(OSError, SealError),
            contextlib.closing(
                peer.accept(sock, self._key, PURPOSE, REACH_S, silence_s=REACH_S, tls=self._tls)
            ) as channel,
        ):
            while not self._over.is_set():
                message = channel.receive(REACH_S * 4)
                if message is None:
                    return
                if message == b"bulk":
                    channel.discard()
                channel.send(repr(time.time()).encode())


def round_name(number: int) -> str:
    """The folder of a round."""
    return f"round-{number:06d}"
