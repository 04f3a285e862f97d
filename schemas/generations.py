"""The record of generations: which is live, which is being built, which was live before and since when.

One value, replaced as a whole (`stores.generations`), so that vectors and KV change places in one step: every
transition here is a pure function from one record to the next, and says why it refuses.

    BUILDING -> BUILT -> LIVE <-> STANDBY -> RECLAIMING -> gone
    (reindex)           (promote, rollback)     (gc)

The first generation that a deployment uses is LIVE at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Any, ClassVar

from pydantic import BaseModel, Field

from schemas.errors import InputError, SettingsError
from schemas.fingerprint import Generation
from schemas.settings import Settings
from schemas.stored import Frozen, Stored

DECIDING = {  # the settings that a generation is made of; empty: all of the section
    "model": ("name", "dtype"),
    "embedder": ("name",),
    "chunker": (),
    "prompt": (),
    "prefill": ("variant", "company", "neighbours"),
}


class GenerationState(StrEnum):
    """What becomes of a generation next is in the module's docstring."""

    BUILDING = "building"
    BUILT = "built"  # everything that was in its source is in it
    LIVE = "live"
    STANDBY = "standby"  # was live
    RECLAIMING = "reclaiming"  # its data is being deleted


class KnownGeneration(Frozen):
    """One generation of the record.

    Attributes:
        settings: the deciding settings, by section, as they were when it was registered.
        group: what is appended to `kafka.group`: each generation reads the topics for itself. Never used twice, so
            that a generation that is made again after it was reclaimed reads from the beginning.
        since_ms: when it came into its state.
    """

    generation: Generation
    settings: dict[str, dict[str, Any]]
    group: str
    state: GenerationState
    since_ms: int

    @property
    def name(self) -> str:
        """`Generation.name`."""
        return self.generation.name

    def bind(self, settings: Settings) -> Settings:
        """The settings with the consumer groups of this generation's pipelines."""
        if not self.group:
            return settings
        kafka = settings.kafka.model_copy(update={"group": f"{settings.kafka.group}.{self.group}"})
        return settings.model_copy(update={"kafka": kafka})

    def adapt(self, settings: Settings) -> Settings:
        """The settings of a process with this generation's deciding ones in their place."""
        sections = {
            name: type(section).model_validate({**section.model_dump(), **values})
            for name, values in self.settings.items()
            if isinstance(section := getattr(settings, name), BaseModel)
        }
        return settings.model_copy(update=sections)


class Generations(Stored):
    """The record. `previous` is what was live before, and what `rollback` makes live again."""

    what: ClassVar[str] = "a record of generations"

    sequence: int = Field(default=0, ge=0)
    known: tuple[KnownGeneration, ...] = ()
    previous: str | None = None

    @property
    def live(self) -> KnownGeneration | None:
        """The generation that questions are answered from; None before the first use."""
        return next((one for one in self.known if one.state is GenerationState.LIVE), None)

    def get(self, name: str) -> KnownGeneration | None:
        """The generation of that name."""
        return next((one for one in self.known if one.name == name), None)

    def named(self, name: str) -> KnownGeneration:
        """The generation whose name begins like that.

        Raises:
            InputError: there is none, or more than one.
        """
        found = [one for one in self.known if one.name.startswith(name)] if name else []
        if len(found) != 1:
            have = ", ".join(f"{one.name} ({one.state})" for one in self.known) or "none"
            raise InputError(f"{name!r} names {len(found)} generations; there are: {have}")
        return found[0]

    def admit(self, generation: Generation) -> None:
        """Return where a process may work on `generation`: it is known and not being reclaimed, or is the first.

        Raises:
            SettingsError: it may not; says in what it differs from the live one.
        """
        entry, live = self.get(generation.name), self.live
        if entry is not None and entry.state is not GenerationState.RECLAIMING:
            return
        if entry is not None:
            raise SettingsError(
                f"generation {generation.name} of these settings is being reclaimed; run `kvquilt gc` to its end, then "
                "`kvquilt reindex`"
            )
        if live is not None:
            raise SettingsError(
                f"these settings make generation {generation.name}, which does not exist; live is {live.name} "
                f"({differences(live.generation, generation)}). To build it beside the live one run `kvquilt reindex` "
                "with these settings; else set back what differs"
            )

    def add(self, generation: Generation, settings: Settings, now_ms: int) -> Generations:
        """With one more: LIVE where it is the first, else BUILDING; the same record where it is known.

        Raises:
            SettingsError: it is being reclaimed.
        """
        entry = self.get(generation.name)
        if entry is not None:
            self.admit(generation)
            return self
        first = self.live is None
        added = KnownGeneration(
            generation=generation,
            settings=deciding(settings),
            group="" if self.sequence == 0 else f"{generation.name}.{self.sequence + 1}",
            state=GenerationState.LIVE if first else GenerationState.BUILDING,
            since_ms=now_ms,
        )
        return self._next(known=(*self.known, added))

    def built(self, name: str, now_ms: int) -> Generations:
        """The building of a generation has come to its end; the same record where it is not being built."""
        entry = self.get(name)
        if entry is None or entry.state not in (GenerationState.BUILDING, GenerationState.BUILT):
            return self
        return self._with({name: GenerationState.BUILT}, now_ms)

    def promote(self, name: str, now_ms: int) -> Generations:
        """That generation live, and the live one on standby; the same record where it is live.

        Raises:
            InputError: it does not exist, or is being reclaimed.
        """
        entry, live = self.named(name), self.live
        if entry.state is GenerationState.LIVE:
            return self
        if entry.state is GenerationState.RECLAIMING:
            raise InputError(f"generation {entry.name} is being reclaimed and cannot become live")
        states = {entry.name: GenerationState.LIVE} | ({live.name: GenerationState.STANDBY} if live else {})
        return self._with(states, now_ms)._same_sequence(previous=live.name if live else None)

    def to_roll_back_to(self) -> KnownGeneration:
        """What was live before.

        Raises:
            InputError: nothing was, or it was reclaimed.
        """
        before = self.get(self.previous) if self.previous else None
        if before is None or before.state is GenerationState.RECLAIMING:
            which = f"generation {self.previous} was reclaimed" if self.previous else "nothing was promoted"
            raise InputError(f"nothing to roll back to: {which}; `kvquilt generations` shows what there is")
        return before

    def reclaiming(self, name: str, now_ms: int) -> Generations:
        """That generation given up: nothing may begin to use it.

        Raises:
            InputError: it is live, or does not exist.
        """
        entry = self.named(name)
        if entry.state is GenerationState.LIVE:
            raise InputError(f"generation {entry.name} is live and is not reclaimed; promote another one first")
        if entry.state is GenerationState.RECLAIMING:
            return self
        return self._with({entry.name: GenerationState.RECLAIMING}, now_ms)

    def spared(self, before: KnownGeneration) -> Generations:
        """`before` as it was, after `reclaiming` found a reader."""
        return self._next(known=tuple(before if one.name == before.name else one for one in self.known))

    def without(self, name: str) -> Generations:
        """One generation less; its data is gone."""
        return self._next(
            known=tuple(one for one in self.known if one.name != name),
            previous=None if self.previous == name else self.previous,
        )

    def _with(self, states: Mapping[str, GenerationState], now_ms: int) -> Generations:
        known = tuple(
            one.model_copy(update={"state": states[one.name], "since_ms": now_ms}) if one.name in states else one
            for one in self.known
        )
        return self._next(known=known)

    def _next(self, **changes: Any) -> Generations:
        return self.model_copy(update={"sequence": self.sequence + 1, **changes})

    def _same_sequence(self, **changes: Any) -> Generations:
        return self.model_copy(update=changes)


Change = Callable[[Generations], Generations]


def deciding(settings: Settings) -> dict[str, dict[str, Any]]:
    """The settings that a generation is made of, as plain values; no secrets are among them."""
    plain = {name: getattr(settings, name).model_dump(mode="json") for name in DECIDING}
    if plain["prefill"]["company"] is not None:
        plain["prefill"]["company"] = str(settings.prefill.company.resolve()) if settings.prefill.company else None
    return {
        name: {field: value for field, value in plain[name].items() if not fields or field in fields}
        for name, fields in DECIDING.items()
    }


def differences(one: Generation, other: Generation) -> str:
    """In what two generations differ, in words."""
    fields = []
    for name, left in _plain(one).items():
        right = _plain(other)[name]
        if left != right:
            fields.append(f"{name} {_short(left)} there, {_short(right)} here")
    return "; ".join(fields) or "nothing"


def _plain(generation: Generation) -> dict[str, Any]:
    plain = generation.model_dump(mode="json")
    return {**{f"model {name}": value for name, value in plain.pop("fingerprint").items()}, **plain}


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 40 else f"{text[:12]}…"
