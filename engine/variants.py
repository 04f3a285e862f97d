"""Chunk prefill variants: what stands in front of a chunk while its rows are computed. Only the chunk's rows are kept.

    alone           chunk                                                positions from 0
    bos             bos | chunk                                          the model's own start of a text
    dummy_prefix    one fixed id | chunk                                 takes the attention sink off the chunk's head
    shared_prefix   prefix | chunk                                       exact for the chunk right behind the prefix
    company         prefix | company | chunk                             a fixed text that belongs to no document
    fused           prefix | nb_n .. nb_1 | chunk                        the nearest neighbour's rows adjacent
    fused_company   prefix | company | nb_n .. nb_1 | chunk              parts of it can be chosen, see `Variant`

Rows are stored before RoPE, so that the place at which they were computed does not matter. A neighbour stands there
as it was prefilled by itself (pass 1), never fused: a chunk's rows depend on its neighbours' texts and on nothing else
(depth one).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING

import torch

from engine.prefill import PrefixRows
from engine.rows import Base, KvRows, Part
from kernels import RopeTables, stitch_kv
from schemas.errors import InputError, SettingsError

if TYPE_CHECKING:
    from engine.model import Model
    from engine.prompt import PromptTemplate
    from engine.tokenizer import Tokenizer
    from schemas.settings import PrefillSettings

FRONTS = ("nothing", "bos", "dummy", "prefix", "company")


@dataclass(frozen=True)
class Variant:
    """How chunks are prefilled.

    Attributes:
        name: what artifacts and tables call it.
        front: what stands in front: one of `FRONTS`; `company` is prefix and company.
        fused: whether neighbours' rows stand between that and the chunk.
        neighbours: front of the neighbours' own prefill (pass 1): `prefix` or `company`.
        pass1_first: the chunk right behind the prefix of a prompt is served from its rows of pass 1, which are those
            of a full prefill there. Needs them kept beside the variant's own.
    """

    name: str
    front: str = "prefix"
    fused: bool = False
    neighbours: str = "prefix"
    pass1_first: bool = False

    @property
    def first_chunk_exact(self) -> bool:
        """Whether the first chunk of a prompt needs no repair."""
        return self.pass1_first or (self.front == "prefix" and not self.fused)

    @property
    def pass1_front(self) -> str:
        """The front of a chunk's own pass 1: the neighbours', where it is fused."""
        return self.neighbours if self.fused else self.front

    @property
    def pass1(self) -> str:
        """Name of the variant that a chunk's rows of pass 1 are of."""
        return next(v.name for v in VARIANTS.values() if v.front == self.pass1_front and not v.fused)

    def front_ids(self, template: PromptTemplate, company: Sequence[int] | None = None) -> tuple[int, ...]:
        """The ids in front of the chunk (and of its neighbours); `company` other than the packaged text."""
        return front_ids(self.front, template, company)


SHARED_PREFIX = Variant("shared_prefix")
VARIANTS: dict[str, Variant] = {
    variant.name: variant
    for variant in (
        Variant("alone", front="nothing"),
        Variant("bos", front="bos"),
        SHARED_PREFIX,
        Variant("dummy_prefix", front="dummy"),
        Variant("company", front="company"),
        Variant("fused", fused=True, pass1_first=True),
        Variant("fused_company", front="company", fused=True, neighbours="company", pass1_first=True),
    )
}


def variant_named(name: str) -> Variant:
    """The variant of that name.

    Raises:
        InputError: there is none.
    """
    if name not in VARIANTS:
        raise InputError(f"there is no prefill variant {name!r}; known are {', '.join(VARIANTS)}")
    return VARIANTS[name]


def front_ids(front: str, template: PromptTemplate, company: Sequence[int] | None = None) -> tuple[int, ...]:
    """The ids that one of `FRONTS` stands for.

    Raises:
        InputError: the model has no id that starts a text, or there is no such front.
    """
    tokenizer = template.tokenizer
    if front == "nothing":
        return ()
    if front == "prefix":
        return template.prefix_ids
    if front == "company":
        ids = company_ids(tokenizer) if company is None else tuple(company)
        return (*template.prefix_ids, *ids, *template.separator_ids)
    if front == "bos":
        if not tokenizer.bos_ids:
            raise InputError("the model's tokenizer puts no id in front of a text; use dummy_prefix instead of bos")
        return tokenizer.bos_ids
    if front == "dummy":
        return tokenizer.bos_ids[:1] or (min(tokenizer.stop_ids, default=0),)
    raise InputError(f"nothing called {front!r} stands in front of chunks; known are {', '.join(FRONTS)}")


def company_ids(tokenizer: Tokenizer, text: str | None = None) -> tuple[int, ...]:
    """Ids of the company: `text`, or the packaged one."""
    return tuple(tokenizer.encode(company_text() if text is None else text))


def company_of(prefill: PrefillSettings, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Ids of the company that the settings name.

    Raises:
        SettingsError: its file cannot be read, or is empty.
    """
    if prefill.company is None:
        return company_ids(tokenizer)
    try:
        text = prefill.company.expanduser().read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"prefill.company: the file {prefill.company} cannot be read: {error}") from error
    if not text:
        raise SettingsError(f"prefill.company: the file {prefill.company} is empty; expected some plain prose")
    return company_ids(tokenizer, text)


@cache
def company_text() -> str:
    """The packaged company: plain prose of several kinds, written for this purpose."""
    return (files("engine") / "company.txt").read_text(encoding="utf-8").strip()


def prefill_variant(
    model: Model,
    variant: Variant,
    template: PromptTemplate,
    chunks: Sequence[Sequence[int]],
    neighbours_of: Callable[[int], Sequence[KvRows]] = lambda _: (),
    *,
    company: Sequence[int] | None = None,
) -> list[KvRows]:
    """Rows of each chunk, in canonical form.

    Args:
        neighbours_of: number of a chunk -> rows of its neighbours from pass 1, nearest first; only asked where the
            variant is fused. What does not fit into the model's longest sequence is left out, the farthest first.
        company: ids of the company, other than the packaged one's.

    Raises:
        InputError: a chunk is empty or too long, or the variant does not fit the model.
        UnsupportedModelError: the model's rows cannot be reused.
    """
    ids = variant.front_ids(template, company)
    if not variant.fused:
        return model.prefill_chunks(ids, chunks)
    return [model.prefill_behind(ids, neighbours_of(number), chunk) for number, chunk in enumerate(chunks)]


def fitting(neighbours: Sequence[KvRows], room: int) -> Sequence[KvRows]:
    """The nearest of `neighbours` (nearest first) that fit into `room` tokens; the first too long one ends it."""
    for number, rows in enumerate(neighbours):
        room -= rows.n_tokens
        if room < 0:
            return neighbours[:number]
    return neighbours


def behind(front: PrefixRows, neighbours: Sequence[KvRows], tables: RopeTables) -> PrefixRows:
    """Front and neighbours (nearest first) as one context, the nearest last: rows at positions 0 and on."""
    if not neighbours:
        return front
    ordered = list(reversed(neighbours))
    n_front, lens = front.n_tokens, [rows.n_tokens for rows in ordered]
    part = Part(front.k, n_front + sum(lens))
    part.k[:, :, :n_front], part.v[:, :, :n_front] = front.k, front.v
    positions = torch.arange(n_front, n_front + sum(lens))
    cos, sin = tables.tables(n_front, n_front + sum(lens), n_front + sum(lens), part.k.device)
    stitch_kv(
        [rows.k for rows in ordered],
        [rows.v for rows in ordered],
        part.k,
        part.v,
        positions=positions,
        slots=positions,
        cos=cos,
        sin=sin,
        pos_base=n_front,
        layout=tables.layout,
        table_of_layer=tables.table_of_layer,
    )
    part.n = len(part.positions)
    part.positions[:] = torch.arange(part.n)
    k, v, _ = Base(part).rows
    return PrefixRows(k, v)
