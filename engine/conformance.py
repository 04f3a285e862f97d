"""Whether a loaded model does what reuse rests on: numbers, in the model's own dtype, over a few hundred tokens.

    rope            exactly one of our rotations is the model's, on every layer, at short and long positions
    shift N         keys and values made at position 0 and moved to N are those that the model makes at N
    stitched        logits over stitched rows are those of one plain pass with the mask that they stand for
    repaired        with every chunk token repaired, those of a plain causal pass
    cached          answering token by token gives the logits of computing prompt and answer anew

Errors are the largest difference relative to the largest value. The checks look into the
model and take no turns: run them where nothing else uses it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from engine.capture import tables_at
from engine.plan import Plan, PlannedChunk, Segment, plan_prompt
from engine.rows import Base, Part
from kernels import rotate
from schemas.certificate import Conformance

if TYPE_CHECKING:
    from engine.model import Model
    from engine.prompt import PromptTemplate

OFFSETS = (0, 1, 1_000, 8_000, 32_000)
_N_SHIFTED, _N_CHUNK, _N_CHUNKS, _N_ANSWER = 48, 40, 4, 6
# fp32: sums in another order; far away the angles themselves have rounding of 1e-3 rad, for the model as for us.
# bf16 and fp16: rounding of rows and activations, through all layers. What is wrong is off by about 1.
_BOUND = {torch.float32: 1e-3, torch.bfloat16: 1e-1, torch.float16: 3e-2}
_FAR_BOUND = {torch.float32: 5e-3, torch.bfloat16: 2e-1, torch.float16: 6e-2}
_FAR = 1_000


@torch.inference_mode()
def check_conformance(model: Model, template: PromptTemplate, ids: Sequence[int]) -> list[Conformance]:
    """Run every check; one that is refused ends the list.

    Args:
        template: the prompt in use.
        ids: token ids of some text, 200 or more.
    """
    if model.reuse_refusal is not None:
        return [Conformance(name="rope", passed=False, says=model.reuse_refusal)]
    fingerprint = model.fingerprint
    tables = ", ".join(f"{name} {sha256[:12]}" for name, sha256 in fingerprint.rope.items())
    checks = [
        Conformance(name="rope", passed=True, says=f"{fingerprint.rope_layout}, {fingerprint.rotary_dim}: {tables}")
    ]
    text = [ids[number % len(ids)] for number in range(_N_CHUNK * _N_CHUNKS + _N_SHIFTED)]
    for offset in OFFSETS:
        if offset + _N_SHIFTED <= model.max_tokens:
            bound = (_BOUND if offset <= 1 else _FAR_BOUND)[model._hf.dtype]
            checks.append(_judged(f"shift {offset}", shift_error(model, text[:_N_SHIFTED], offset), bound))
    chunks = [text[at : at + _N_CHUNK] for at in range(0, _N_CHUNK * _N_CHUNKS, _N_CHUNK)]
    plan = plan_prompt(template, template.question_ids("What is this?"), [PlannedChunk(tuple(c), True) for c in chunks])
    base = model.stitch(plan, model.prefill_chunks(plan.prefix_ids, chunks))
    for name, error in (
        ("stitched", stitched_error(model, plan, base)),
        ("repaired", repaired_error(model, plan, base)),
        ("cached", cached_error(model, plan, base, text[-_N_ANSWER:])),
    ):
        checks.append(_judged(name, error, _BOUND[model._hf.dtype]))
    return checks


@torch.inference_mode()
def shift_error(model: Model, ids: Sequence[int], offset: int) -> float:
    """Rows of `ids` made at position 0 and moved to `offset`, against those that the model makes there."""
    (rows,) = model.prefill_chunks((), [ids])
    positions = torch.arange(offset, offset + len(ids))
    there = Base(Part(model._like, len(ids))).open(0)
    there.begin(positions)
    model._hf.run(torch.tensor(ids), positions, there)
    k, v = there.own
    tables = model._tables
    cos, sin = tables_at(tables, positions, offset + len(ids), k.device)
    worst = relative(rows.v.to(v.device), v)
    for layer, table in enumerate(tables.table_of_layer):
        moved = rotate(rows.k[layer].to(k.device), cos[table], sin[table], tables.layout)
        worst = max(worst, relative(moved, k[layer]))
    return worst


def stitched_error(model: Model, plan: Plan, base: Base) -> float:
    """Logits of separators and question over stitched rows, against a plain pass with an explicit mask.

    In the plain pass every chunk has a copy of the prefix right in front of it, at the positions before it, which
    only that chunk sees: what it saw when it was prefilled.
    """
    n_prefix = plan.segments[0].end
    ids: list[int] = []
    positions: list[int] = []
    owners: list[int] = []  # -1: all see it; 2n: the copy for chunk n; 2n + 1: chunk n
    for segment in plan.segments:
        if segment.chunk is not None:
            ids += plan.prefix_ids
            positions += range(segment.start - n_prefix, segment.start)
            owners += [2 * segment.chunk] * n_prefix
        ids += plan.token_ids[segment.start : segment.end]
        positions += range(segment.start, segment.end)
        owners += [-1 if segment.chunk is None else 2 * segment.chunk + 1] * len(segment)
    position, owner = torch.tensor(positions), torch.tensor(owners)
    own, other = owner[:, None], owner[None, :]
    sees_all = (own == -1) & (other % 2 == 1)  # -1 is odd too
    sees_own = (own == other) | ((own % 2 == 1) & (own >= 0) & (other == own - 1))
    visible = (position[None, :] <= position[:, None]) & (sees_all | sees_own)
    truth = model._hf.plain_logits(torch.tensor(ids), position, visible)
    at = torch.isin(position, torch.tensor(plan.open_positions)) & (owner == -1)
    return relative(model.logits(plan, base, keep=0), truth[at])


def repaired_error(model: Model, plan: Plan, base: Base) -> float:
    """Logits with all chunk tokens repaired, against a plain causal pass."""
    everything = torch.cat([torch.arange(chunk.start, chunk.end) for chunk in plan.chunks])
    truth = model._hf.plain_logits(torch.tensor(plan.token_ids))[plan.segments[0].end :]
    return relative(model.logits(plan, base, keep=0, repair=everything), truth)


def cached_error(model: Model, plan: Plan, base: Base, answer: Sequence[int]) -> float:
    """Logits along an answer, each token over the rows of those before it, against computing all of it anew."""
    with model.session(plan, base) as session:
        stepwise = [session.prompt(), *(session.extend([token], n)[0] for n, token in enumerate(answer))]
    last = plan.segments[-1]
    longer = Segment(last.start, last.end + len(answer), last.source)
    whole = Plan((*plan.token_ids, *answer), (*plan.segments[:-1], longer))
    return relative(torch.stack(stepwise), model.logits(whole, base, keep=len(answer) + 1))


def relative(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Largest difference over largest value; NaN counts as 1e9."""
    error = float((ours.float() - theirs.float()).abs().max() / theirs.float().abs().max().clamp_min(1e-6))
    return error if error < 1e9 else 1e9  # NaN is not smaller than anything


def _judged(name: str, error: float, bound: float) -> Conformance:
    return Conformance(name=name, passed=error <= bound, error=error, bound=bound)
