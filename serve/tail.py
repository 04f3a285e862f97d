"""Keeps the tiers of this replica true: it follows the commits topic, and says so for deletion receipts.

Every replica reads every record, without a group, from the end that the topic had when it started. A record drops what
it puts out of date. Answers never depend on that: what is visible is decided by the heads at each question. While the
broker is away, the tiers are compared with the heads again and again instead, and so they are once in a long while, for
whatever may have been missed.

The replica's word (`schemas.replica`) goes to the object store: before anything is kept, every few seconds, and soon
after a tombstone. While it cannot be given the tiers are empty and shut: a second thread sees to that, since the
first may hang in a call of a store. A tombstone whose receipt waits for replicas
is looked at after that: whoever comes last, PREFILL or a replica, closes it.
"""

from __future__ import annotations

import itertools
import logging
import os
import re
import secrets
import socket
import threading
import time
from collections import OrderedDict, deque
from contextlib import suppress

from schemas.errors import EventError, StoreError, TopicError
from schemas.head import CommitRecord, DocumentState
from schemas.ids import DocumentKey
from schemas.receipt import ReceiptState, Tier
from schemas.replica import Dropped, Replica
from serve.parts import Parts
from serve.receipts import settle
from serve.telemetry import Telemetry
from serve.tiers import Tiers
from stores.clock import Clock, SystemClock
from stores.kafka_client import Message
from stores.replicas import LEASE_S, Replicas
from stores.tail import Tail

_log = logging.getLogger("kvquilt.serve")

POLL_S = 0.25
LOST_S = 5.0  # without an answer of the broker; an idle reader asks every 2 s
REOPEN_S = 300.0  # partitions may have been added
WHOLE_CHECK_S = 300.0  # the heads, even while all is well
SAY_S = LEASE_S / 3
SAY_AGAIN_S = 0.5  # after tombstones
SETTLE_S = 1.0
WATCH_S = 0.5
MAX_OPEN = 10_000  # deletions whose receipts are looked at; `kvquilt reconcile` closes what is beyond
_numbers = itertools.count(1)


class CommitTail:
    """One replica's tail, in a thread of its own.

    Args:
        check_s: how often the tiers are compared with the heads while the topic cannot be followed.
        settle_s: how long it looks at receipts at a stretch: then it is time for records, and for the replica's word.
    """

    def __init__(
        self,
        parts: Parts,
        tiers: Tiers,
        telemetry: Telemetry,
        check_s: float,
        clock: Clock | None = None,
        settle_s: float = SETTLE_S,
    ) -> None:
        self._settle_s = settle_s
        self._parts, self._tiers, self._telemetry, self._check_s = parts, tiers, telemetry, check_s
        self._clock = clock or SystemClock()
        self._replicas = Replicas(parts.blobs, parts.generation.name, self._clock)
        self.name = replica_name()
        self._reader: Tail | None = None
        self._positions: dict[int, int] | None = None  # of the last reader
        self._clean_ms = self._clock.now_ms()
        self._open: OrderedDict[tuple[DocumentKey, int], dict[Tier, int]] = OrderedDict()
        self._round: deque[tuple[DocumentKey, int]] = deque()  # of `_open`, to be looked at
        self._due = _Due()
        self._unsure = True  # records may have been missed since the tiers were last compared with the heads
        self._spoken_s = float("-inf")
        self._word = threading.Lock()  # held while the word and the tiers change together
        self._deleted = False  # since the last word
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="commits", daemon=True)
        self._watcher = threading.Thread(target=self._watch, name="replica's word", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()
        self._watcher.start()

    def stop(self) -> None:
        """Ask it to end: the tiers are let go of and the replica's word is taken back, in its own thread."""
        self._stop.set()

    def close(self) -> None:
        """End, and wait for it."""
        self.stop()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self.step()
            except Exception:  # whatever it is: nothing may be kept that nobody looks after
                _log.exception("following the commits topic failed; the tiers are emptied")
                self._tiers.shut()
                self._spoken_s = float("-inf")
                self._stop.wait(self._check_s)
        self._tiers.shut()
        if self._reader is not None:
            self._reader.close()
        with suppress(StoreError):  # it runs out
            self._replicas.leave(self.name)

    def _watch(self) -> None:
        """Shut the tiers when the word has run out: from then on no receipt waits for this replica."""
        while not self._stop.wait(WATCH_S):
            with self._word:
                if time.monotonic() - self._spoken_s > LEASE_S and self._tiers.keeps:
                    _log.warning("this replica could not give its word in time; its KV in memory is let go of")
                    self._tiers.shut()

    def step(self) -> None:
        """One look at everything; waits for records, no longer than `POLL_S`."""
        self._speak()
        self._follow()
        messages = self._reader.poll(500, POLL_S) if self._reader is not None else self._pause()
        for message in messages:
            self._take(message)
        self._judge_contact()
        self._check()
        self._close_receipts()

    def _pause(self) -> list[Message]:
        self._stop.wait(POLL_S)
        return []

    def _follow(self) -> None:
        """Have a reader: a new one in the place of one that is old, where the broker answers."""
        opener = self._parts.commits
        if opener is None or not self._due("open", REOPEN_S if self._reader is not None else self._check_s):
            return
        try:
            reader = opener(self._positions)
        except TopicError as error:
            if self._reader is None:
                _log.warning("the commits topic cannot be followed, the heads are read instead: %s", error)
            return
        if self._reader is not None:
            self._reader.close()
        elif self._positions is None:
            self._unsure = True
            self._due.now("check")
        self._reader, self._positions = reader, reader.position()

    def _take(self, message: Message) -> None:
        try:
            record = CommitRecord.from_bytes(message.value or b"")
        except EventError:
            return  # PREFILL puts it aside
        if record.generation != self._parts.generation.name:
            return
        dropped = self._tiers.passed(record)
        if record.state is DocumentState.DELETED:
            self._deleted = True
            name = record.document, record.version
            self._open[name] = _sum(self._open.pop(name, {}), dropped)
            if len(self._open) > MAX_OPEN:
                self._open.popitem(last=False)

    def _judge_contact(self) -> None:
        reader = self._reader
        age_s = float("inf") if reader is None else (self._clock.now_ms() - reader.last_contact_ms) / 1000
        self._telemetry.tail_contact.set(age_s)
        followed = age_s <= LOST_S and not self._unsure
        if self._tiers.followed and age_s > LOST_S:
            _log.warning("the commits topic has not been read for %.0f s; the heads are read instead", age_s)
        self._tiers.followed = followed
        if reader is not None:
            self._positions = reader.position()

    def _check(self) -> None:
        if not self._due("check", WHOLE_CHECK_S if self._tiers.followed else self._check_s):
            return
        began_ms = self._clock.now_ms()
        try:
            self._tiers.check()
        except StoreError as error:
            _log.warning("KV in memory could not be compared with the heads: %s", error)
        else:
            self._clean_ms, self._unsure = began_ms, False

    def _speak(self) -> None:
        """Give this replica's word where it is time; without it nothing is kept."""
        since_s = time.monotonic() - self._spoken_s
        if since_s > LEASE_S:
            with self._word:
                self._tiers.shut()
            self._clean_ms = self._clock.now_ms()
        if since_s < (SAY_AGAIN_S if self._deleted else SAY_S):
            return
        began_s = time.monotonic()
        dropped = tuple(
            Dropped(
                tenant_digest=document.tenant_digest, document_digest=document.digest, version=version, counts=counts
            )
            for (document, version), counts in self._open.items()
            if counts
        )
        word = Replica(name=self.name, positions=self._positions or {}, clean_ms=self._clean_ms, dropped=dropped)
        try:
            self._replicas.say(word)
        except StoreError as error:
            if self._due("log", SAY_S):
                _log.warning("this replica keeps no KV in memory unless it can say so: %s", error)
            self._tiers.told()
            return
        with self._word:
            lapsed = since_s > LEASE_S or time.monotonic() - self._spoken_s > LEASE_S  # while it was being said, too
            self._spoken_s, self._deleted = began_s, False
            if lapsed:  # what is still kept was nobody's to wait for
                self._tiers.shut()
                self._tiers.open()
        self._due.now("receipts")

    def _close_receipts(self) -> None:
        """Of tombstones that this replica has passed, and said so; those of one round may take several steps."""
        if not self._open or self._deleted:
            return
        if not self._round and self._due("receipts", SAY_S):
            self._round.extend(self._open)
        end_s = time.monotonic() + self._settle_s
        while self._round and not self._stop.is_set():
            document, version = self._round.popleft()
            try:
                receipt = settle(self._parts, document, version)
            except StoreError as error:
                _log.warning("the receipt of a deletion could not be looked at: %s", error)
                self._round.clear()
                return
            if receipt.state is ReceiptState.COMPLETE:
                self._telemetry.receipts_closed.inc()
                self._open.pop((document, version), None)
            if time.monotonic() >= end_s:
                return


class _Due:
    """When something was last done, by name."""

    def __init__(self) -> None:
        self._at_s: dict[str, float] = {}

    def __call__(self, name: str, every_s: float) -> bool:
        """Whether it is time again; then it counts as done now."""
        now_s = time.monotonic()
        if now_s - self._at_s.get(name, float("-inf")) < every_s:
            return False
        self._at_s[name] = now_s
        return True

    def now(self, name: str) -> None:
        """It is time."""
        self._at_s.pop(name, None)


def replica_name() -> str:
    """A name that no other replica has or had."""
    host = re.sub(r"[^A-Za-z0-9_.-]", "-", socket.gethostname())[:60] or "host"
    return f"{host}-{os.getpid()}-{next(_numbers)}-{secrets.token_hex(4)}"


def _sum(first: dict[Tier, int], second: dict[Tier, int]) -> dict[Tier, int]:
    return {tier: first.get(tier, 0) + second.get(tier, 0) for tier in {*first, *second}}
