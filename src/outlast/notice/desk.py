"""Hear notices on this machine: from signals, and from the platform's watchers.

``PlatformDesk`` finds out the platform, behind the training's back, and starts its watchers. It is
used by the agent of each machine, and by the first worker of a machine without an agent.
``NoticeDesk`` is the agent's. The first notice counts, and one after it that leaves less time; a
second SIGINT, or a SIGTERM after the deadline, ends the workers at once. An early notice is kept
beside it: a real one may follow. Hearing is all that happens here: the agent tells the workers,
they agree on a step and drain.

A notice becomes the fields of the ledger's event ``notice``, and what workers are told. Before any
comes, ``GraceCheck`` says whether the seconds that this platform gives are enough for this job,
once that is known (the platform is found out, and a save was seen, in this run or an earlier one)
and whenever the answer changes: ``grace 120 s, save needs 38 s ✔``.

``Deaf`` warns of workers that cannot be told: without a session, and without a handler of SIGTERM.
Such a script trains on until its machine goes, and what it has not saved by itself is lost. People
are told where the platform gives notices, once an attempt has run for ``START_S`` (a script may
import for a while before it opens its session), and at a notice. A session that opens after a
notice hears of it and leaves, so nothing is claimed of what a script has yet to do.
"""

from __future__ import annotations

import logging
import shutil
import threading
import time
from collections.abc import Callable
from typing import Any, Final

from outlast.config import Settings
from outlast.errors import ConfigError
from outlast.ledger.events import Event
from outlast.ledger.file import Ledger
from outlast.ledger.measured import Measured
from outlast.ledger.narrator import say
from outlast.notice import Acknowledger, Notice
from outlast.notice.platform import Chosen, choose
from outlast.notice.signals import SignalNotice, signal_notice
from outlast.notice.source import MetadataWatcher, WatchThread
from outlast.policy.drain import HTTP_S, DrainTier, check, on_early
from outlast.storage.trust import outlasts
from outlast.tiers import Tier

logger = logging.getLogger(__name__)

LEAST_S: Final = 1.0


def fields_of(notice: Notice, settings: Settings) -> dict[str, Any]:
    """What the ledger keeps; of an early one also what is done about it."""
    fields: dict[str, Any] = {
        "source": notice.source,
        "action": notice.action,
        "deadline_t": notice.deadline_t,
        "detail": notice.detail,
    }
    if notice.early:
        fields["early"] = True
        fields["answer"] = answer_to(notice, settings)
    return fields


def kind_fields(settings: Settings, chosen: Chosen) -> dict[str, Any]:
    """What the ledger keeps of what kind of machine this is; {} where nobody says.

    It asks the machine's platform, which takes as long as a few requests may.
    """
    if settings.price_kind is not None:
        return {"kind": settings.price_kind, "source": "price.kind"}
    watcher = next((one for one in chosen.watchers if isinstance(one, MetadataWatcher)), None)
    if watcher is None:
        return {}
    # Another one than is being asked for notices: each is one thread's.
    kind = type(watcher)(watcher.base_url).machine_kind()
    return {"kind": kind, "source": watcher.name} if kind else {}


def answer_to(notice: Notice, settings: Settings) -> str:
    """What is done about an early notice: "leave", "save" or "ignore"."""
    return on_early(settings.notice_early, has_deadline=notice.deadline_t is not None)


def request_of(notice: Notice, settings: Settings) -> dict[str, Any]:
    """What the ranks are told: seconds instead of a time, since their clocks may differ."""
    left_s = notice.seconds_left(time.time())
    info: dict[str, Any] = {
        "reason": f"notice from {notice.source}",
        # A deadline that is past is tried: nothing is lost by it, and no platform is that exact.
        "left_s": None if left_s is None else max(left_s, LEAST_S),
    }
    if notice.early:
        info["answer"] = answer_to(notice, settings)
    return info


def drain_tiers(tiers: tuple[Tier, ...], measured: Measured) -> list[DrainTier]:
    """The durable tiers as a drain sees them, with what they have shown."""
    found = []
    for tier in tiers:
        if tier.kind == "memory":
            continue
        seen = measured.save(tier.name)
        one = DrainTier(
            name=tier.name,
            outlasts=tier.kind == "object" or outlasts(tier.url),
            slow_s=seen.slow_s if seen else None,
            fast_s=seen.fast_s if seen else None,
            size=measured.sizes.get(tier.name, 0),
        )
        found.append(one)
    return found


def standing(tiers: tuple[Tier, ...], measured: Measured) -> str:
    """Which tiers do not have the newest checkpoint, in words; "" when all have it."""
    durable = [tier.name for tier in tiers if tier.kind != "memory"]
    newest = max((measured.newest.get(name, 0) for name in durable), default=0)
    if measured.missed is not None and measured.missed[0] > newest:
        step, why = measured.missed
        return f"step {step} was in memory alone, and is lost: {why}; step {newest} stands"
    behind = [name for name in durable if measured.newest.get(name, 0) < newest]
    if not behind:
        return ""
    where = ", ".join(name for name in durable if name not in behind)
    older = ", ".join(
        f"{name} has {f'step {step}' if (step := measured.newest.get(name, 0)) else 'nothing'}"
        for name in behind
    )
    return f"step {newest} is in {where} alone: {older}"


class GraceCheck:
    """Follows the ledger and says whether a notice is long enough.

    Args:
        settings: the job's.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._measured = Measured()
        self._chosen: Chosen | None = None
        self._told: bool | None = None
        self._is_leaving = False
        self._lock = threading.Lock()

    def found(self, chosen: Chosen) -> None:
        """The platform is known."""
        with self._lock:
            self._chosen = chosen
            self._tell()

    def saving_s(self) -> float | None:
        """Seconds until a save is in the fastest durable tier, slowly; None before the first."""
        with self._lock:
            found = [one.slow_s for one in drain_tiers(self._settings.tiers, self._measured)]
        return min((seconds for seconds in found if seconds is not None), default=None)

    def take(self, event: Event) -> None:
        """One more event of the ledger."""
        with self._lock:
            self._measured.take(event)
            if event.event == "attempt_formed":
                self._is_leaving = False
            elif event.event == "notice" and not event.get("early"):
                self._is_leaving = True  # now it will be seen, not foreseen
            elif event.event in ("commit", "tier_copied"):
                self._tell()

    def _tell(self) -> None:
        chosen, settings = self._chosen, self._settings
        if chosen is None or self._is_leaving:
            return
        notice_s = settings.notice_grace_s or chosen.lead_s or chosen.grace_s
        if notice_s is None:
            return
        step = self._measured.step
        found = check(
            notice_s,
            drain_tiers(settings.tiers, self._measured),
            heard_s=settings.notice_poll_s + HTTP_S if chosen.watchers else 0.0,
            step_s=step.slow_s if step else 0.0,
            leaves=bool(chosen.lead_s),
        )
        if found is not None and found.fits != self._told:
            self._told = found.fits
            say(found.words)


LIMIT_WARNED_S: Final = 180.0  # ahead of a time limit: two minutes, and Slurm may be one early


def chosen_for(settings: Settings) -> Chosen:
    """The sources of notices that the settings ask for."""
    return choose(
        settings.notice_platform,
        settings.notice_base_url,
        file=settings.notice_file,
        command=settings.notice_command,
        end=settings.notice_end,
    )


def checked(settings: Settings) -> Settings:
    """The settings, if what they name as a source of notices can be asked.

    Raises:
        ConfigError: ``notice.command`` is a program that is not there.
    """
    command = settings.notice_command
    if command and shutil.which(command[0]) is None:
        source = settings.origin.get("notice.command", "")
        raise ConfigError(
            f"notice.command{f' (from {source})' if source else ''}: there is no program "
            f"{command[0]}, so no notice would be heard from it; check the path"
        )
    return settings


class PlatformDesk:
    """Listens to the platform's watchers.

    Args:
        settings: the job's.
        on_notice: told of each distinct notice, in a watcher's thread.
        on_found: told which platform it is, in a thread.

    Attributes:
        chosen: what was found out, None until then.
    """

    def __init__(
        self,
        settings: Settings,
        on_notice: Callable[[Notice], None],
        on_found: Callable[[Chosen], None],
    ) -> None:
        self.chosen: Chosen | None = None
        self._settings = settings
        self._on_notice = on_notice
        self._on_found = on_found
        self._watches: list[WatchThread] = []
        self._closing = threading.Event()
        self._finder = threading.Thread(target=self._find, name="outlast-platform", daemon=True)

    def open(self) -> None:
        """Begin to find out; returns at once."""
        self._finder.start()

    def close(self) -> None:
        """Stop listening."""
        self._closing.set()
        self._finder.join(timeout=3)
        for watch in self._watches:
            watch.stop()

    def acknowledge(self, notice: Notice) -> bool:
        """Everything is saved: tell the platform that it need not wait, if that was asked for.

        Returns:
            Whether the platform was told, and agreed.
        """
        if not self._settings.notice_approve or self.chosen is None:
            return False
        return any(
            watcher.acknowledge(notice)
            for watcher in self.chosen.watchers
            if watcher.name == notice.source and isinstance(watcher, Acknowledger)
        )

    def grace_s(self) -> float | None:
        """Seconds from a signal to the end: as set, as the platform has it, or None.

        Slurm sends the same signal ahead of a job's time limit as when it takes the machine: near
        the limit it is taken for the former.
        """
        set_s = self._settings.notice_grace_s
        if set_s is not None or self.chosen is None:
            return set_s
        ends_t = [getattr(watcher, "end_t", None) for watcher in self.chosen.watchers]
        left_s = [end_t - time.time() for end_t in ends_t if end_t is not None]
        near_s = [one for one in left_s if 0 < one <= LIMIT_WARNED_S]
        return max([*near_s, self.chosen.grace_s or 0.0]) or None

    def _find(self) -> None:
        try:
            chosen = chosen_for(self._settings)
        except Exception:  # whatever it is, signals are still heard
            logger.exception("the platform was not found out: notices from signals only")
            return
        self.chosen = chosen
        for watcher in chosen.watchers:
            if self._closing.is_set():
                return
            watch = WatchThread(watcher, self._on_notice, interval_s=self._settings.notice_poll_s)
            self._watches.append(watch)
            watch.start()
        self._on_found(chosen)


START_S: Final = 30.0
IMPORT_S: Final = 5.0  # at a notice, which leaves little time
WHAT_TO_DO: Final = (
    "outlast.session(model=model, optimizer=optimizer) around its loop would save and leave"
)


class Deaf:
    """Warns, once at the start and once for each notice, of workers that would not hear it.

    Args:
        are_deaf: whether none of this machine's workers would hear of a notice now.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        are_deaf: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._are_deaf = are_deaf
        self._clock = clock
        self._began_s = clock()
        self._has_looked = False
        self._told_of: object = None

    def begin(self) -> None:
        """Workers start."""
        self._began_s = self._clock()

    def look(self, *, gives_notices: bool) -> None:
        """While there is no notice.

        Args:
            gives_notices: whether this machine's platform does, as far as is known.
        """
        if self._has_looked or not gives_notices or self._age_s < START_S:
            return
        self._has_looked = True
        if self._are_deaf():
            say(
                "this machine's platform gives notice before it takes the machine, and this script "
                "would save nothing now: it has no session yet and handles no SIGTERM; "
                f"{WHAT_TO_DO}"
            )

    def at_notice(self, notice: object, *, left_s: float | None) -> None:
        """While there is one: nobody is to believe that something is saved.

        Args:
            notice: which.
            left_s: until the machine goes, in seconds; None where nobody said.
        """
        if notice is self._told_of or self._age_s < IMPORT_S:
            return
        self._told_of = notice
        if self._are_deaf():
            until = "to its end" if left_s is None else f"until the machine goes in {left_s:.0f} s"
            say(
                "nothing is saved so far: this script has no session yet and handles no SIGTERM. "
                f"Unless it opens one, it runs on {until} and nothing is saved; {WHAT_TO_DO}"
            )

    @property
    def _age_s(self) -> float:
        return self._clock() - self._began_s


SOONER_S: Final = 1.0  # what is a word of the same end is no news


class NoticeDesk:
    """Hears notices for one machine.

    Attributes:
        notice: the first one heard, or None.
        early: the newest early one, or None.
        impatient: whether a person has asked a second time.
    """

    def __init__(self, settings: Settings, ledger: Ledger, grace_check: GraceCheck) -> None:
        self.notice: Notice | None = None
        self.early: Notice | None = None
        self.impatient = False
        self._settings = settings
        self._ledger = ledger
        self._grace_check = grace_check
        self._is_open = False
        self._lock = threading.Lock()
        self._signals = SignalNotice(self._on_signal, interrupt=True)
        self._platform = PlatformDesk(settings, self._hear, self._found)

    def open(self) -> None:
        """Begin to listen; finding out the platform goes on in the background."""
        self._is_open = True
        self._signals.install()
        self._platform.open()

    def close(self) -> None:
        """Stop listening."""
        if not self._is_open:
            return
        if self.notice is not None:
            # Whoever ends processes signals more than once: that must not hide the exit code.
            self._signals.deafen()
        else:
            self._signals.remove()
        self._platform.close()

    def acknowledge(self) -> None:
        """Everything is saved: the machine may go before its time, if that was asked for."""
        if self.notice is not None and self._platform.acknowledge(self.notice):
            say(f"{self.notice.source} was told that this machine may go now")

    def request(self) -> dict[str, Any] | None:
        """What the workers are to be told, its seconds counted from now; None before a notice."""
        return None if self.notice is None else request_of(self.notice, self._settings)

    def early_request(self) -> dict[str, Any] | None:
        """The same for an early notice."""
        return None if self.early is None else request_of(self.early, self._settings)

    def saving_s(self) -> float | None:
        """How long a save takes, when it goes slowly; None before the first."""
        return self._grace_check.saving_s()

    @property
    def gives_notices(self) -> bool:
        """Whether the platform is known to give any."""
        chosen = self._platform.chosen
        return chosen is not None and (bool(chosen.watchers) or chosen.grace_s is not None)

    def _found(self, chosen: Chosen) -> None:
        say(chosen.reason)
        self._grace_check.found(chosen)
        if fields := kind_fields(self._settings, chosen):
            self._ledger.append("machine", durable=False, **fields)

    def _on_signal(self, name: str) -> None:
        if self.notice is not None and name == "SIGINT":
            self.impatient = True
        # A person's Ctrl-C leaves all the time in the world.
        grace_s = None if name == "SIGINT" else self._platform.grace_s()
        self._hear(signal_notice(name, grace_s))

    def _hear(self, notice: Notice) -> None:
        with self._lock:
            if self.notice is not None and (notice.early or not _is_sooner(notice, self.notice)):
                return
            if notice.early:
                self.early = notice
            else:
                self.notice = notice
        self._ledger.append("notice", **fields_of(notice, self._settings))


def _is_sooner(notice: Notice, than: Notice) -> bool:
    if notice.deadline_t is None:
        return False
    return than.deadline_t is None or notice.deadline_t < than.deadline_t - SOONER_S
