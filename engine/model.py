"""The LLM with reusable KV: chunk prefill, stitch, generate. One object per process, shared by all threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from engine.capture import Capture
from engine.decode import SamplingParams, Step
from engine.hf_adapter import HfModel, ModelSpec
from engine.passes import PassMemo, PassRows
from engine.plan import Plan
from engine.policies import Policy
from engine.prefill import ChunkPrefill, Prefixes, PrefixRows
from engine.repair import check_repair, open_and_repaired
from engine.rows import Base, KvRows, Part, WorkingRows
from engine.selection import SelectionContext
from engine.self_check import check_attention, check_capture
from engine.session import Session
from engine.smoothed import Smoothed
from engine.steps import Answering
from engine.stitch import stitch
from engine.tokenizer import Tokenizer
from engine.turns import Turns
from engine.variants import behind, fitting
from kernels import RopeTables
from schemas.errors import InputError, RequestError, UnsupportedModelError
from schemas.fingerprint import Fingerprint

BATCH_TOKENS = 4096  # chunk tokens per prefill pass
_PROBE_TOKENS = 256  # of the pass that finds out the pace
_STITCH_TOKENS = 1024  # fresh chunk tokens per pass of a stitch: between passes it can be cancelled


class Model:
    """A loaded causal LM. Thread-safe: passes take turns, answers before ingest.

    Attributes:
        fingerprint: what its KV rows are.
        reuse_refusal: one sentence where they cannot be reused at other positions, else None.
        spec: shapes.
        max_tokens: longest sequence that the model was made for.
    """

    def __init__(
        self, hf: HfModel, spec: ModelSpec, fingerprint: Fingerprint, tokenizer: Tokenizer, *, model_type: str
    ) -> None:
        """Put a loaded model to the test: its attention must work over our rows.

        Raises:
            UnsupportedModelError: it does not, so the model cannot be served at all.
        """
        self.spec, self.fingerprint, self.tokenizer = spec, fingerprint, tokenizer
        self.reuse_refusal, self.max_tokens = spec.reuse_refusal, spec.max_tokens
        self._hf, self._turns = hf, Turns()
        self._like = torch.empty(spec.n_layers, spec.n_kv_heads, 0, spec.head_dim, dtype=hf.dtype, device=hf.device)
        self._prefixes = Prefixes(hf, self._turns, self._like)
        self._answers = Answering(hf, self._turns, tokenizer)
        with torch.inference_mode():
            check_attention(hf, self._like)
            if self.reuse_refusal is None:
                heads = spec.n_kv_heads * spec.n_groups
                self._capture = Capture(model_type, hf.layers, heads, spec.n_kv_heads, spec.head_dim)
                try:
                    self._tables = RopeTables.from_model(hf.module)
                    check_capture(hf, self._capture, self._tables, self._like)
                    self._chunks = ChunkPrefill(hf, self._turns, self._capture, self._tables)
                except UnsupportedModelError as error:
                    self.reuse_refusal = str(error)

    @torch.inference_mode()
    def prefill_chunks(
        self, prefix_ids: Sequence[int], chunks: Sequence[Sequence[int]], *, batch_tokens: int = BATCH_TOKENS
    ) -> list[KvRows]:
        """Rows of each chunk computed behind the prefix (variant `shared_prefix`), in canonical form.

        Several chunks go into one pass, up to `batch_tokens`; each pass is one turn, after answers under way.

        Raises:
            UnsupportedModelError: the model's rows cannot be reused.
            InputError: a chunk is empty, too long for the model, or holds an id outside the vocabulary.
        """
        self._require_reuse()
        for number, chunk in enumerate(chunks):
            self._check_ids(chunk, f"chunk {number}")
            if len(prefix_ids) + len(chunk) > self.max_tokens:
                raise InputError(
                    f"chunk {number} has {len(chunk)} tokens behind a prefix of {len(prefix_ids)}; "
                    f"the model takes {self.max_tokens}. Cut smaller chunks"
                )
        return self._chunks.behind(self._prefix(tuple(prefix_ids)), chunks, batch_tokens, background=True)

    @torch.inference_mode()
    def prefill_behind(self, front_ids: Sequence[int], neighbours: Sequence[KvRows], chunk: Sequence[int]) -> KvRows:
        """Rows of a chunk computed behind `front_ids` and its neighbours' rows (nearest first; it comes last).

        Neighbours that do not fit into the model's longest sequence are left out, the farthest first.

        Raises:
            UnsupportedModelError: the model's rows cannot be reused.
            InputError: the chunk is empty, too long for the model, or holds an id outside the vocabulary.
        """
        self._require_reuse()
        self._check_ids(chunk, "the chunk")
        room = self.max_tokens - len(front_ids) - len(chunk)
        if room < 0:
            raise InputError(
                f"the chunk has {len(chunk)} tokens behind {len(front_ids)}; the model takes {self.max_tokens}"
            )
        context = behind(self._prefix(tuple(front_ids)), fitting(neighbours, room), self._tables)
        (rows,) = self._chunks.behind(context, [chunk], BATCH_TOKENS, background=True)
        return rows

    @torch.inference_mode()
    def precompute(self, prefix_ids: Sequence[int]) -> None:
        """Compute a prefix's rows now, so that no answer waits for them; and find out the pace of chunk prefill."""
        rows = self._prefix(tuple(prefix_ids))
        if self.reuse_refusal is None and self._chunks.pace_s.value is None:
            chunk = [n % self.spec.vocab_size for n in range(min(_PROBE_TOKENS, self.max_tokens - rows.n_tokens))]
            for _ in range(2 if chunk else 0):
                self._chunks.pace_s = Smoothed()  # a first pass also compiles and allocates
                self._chunks.behind(rows, [chunk], BATCH_TOKENS, background=False)

    @property
    def prefill_pace_s(self) -> float | None:
        """Seconds that a token of a fresh chunk costs an answer, as lately measured; None where it is not known."""
        return self._chunks.pace_s.value if self.reuse_refusal is None else None

    @property
    def exact_rows_last(self) -> bool:
        """Whether rows of a full prefill are those of any longer prompt that begins the same."""
        return self.reuse_refusal is None and not self._tables.length_dependent

    @torch.inference_mode()
    def stitch(
        self,
        plan: Plan,
        rows: Sequence[KvRows | None],
        *,
        room: int = 256,
        cancelled: Callable[[], bool] = lambda: False,
        fronts: Sequence[Sequence[int]] | None = None,
        prefix: PrefixRows | None = None,
    ) -> Base:
        """The base of a request: prefix and chunks, rotated to their positions.

        Args:
            plan: the prompt.
            rows: one per chunk of the plan; None for a chunk that is fresh. Its rows are computed here, the way
                they would have been stored, so that the answer is the same.
            room: slots for what the request itself computes; more is found when it is needed.
            cancelled: asked before every pass over fresh chunks.
            fronts: for each chunk the ids that it is computed behind where it is fresh; without them the prefix.
            prefix: the rows of the plan's prefix, where they are at hand.

        Returns:
            A base that any number of `generate` calls may use, also at the same time.

        Raises:
            UnsupportedModelError: the model's rows cannot be reused.
            ValueError: `rows` do not fit the plan.
            Cancelled: `cancelled` said yes.
        """
        self._require_reuse()
        if len(rows) != len(plan.chunks):
            raise ValueError(f"the plan has {len(plan.chunks)} chunks, rows were given for {len(rows)}")
        missing = [number for number, chunk in enumerate(rows) if chunk is None]
        filled = list(rows)
        with self._turns.answering():
            behind = {n: plan.prefix_ids if fronts is None else tuple(fronts[n]) for n in missing}
            for front in dict.fromkeys(behind.values()):
                numbers = [n for n in missing if behind[n] == front]
                ids = [plan.token_ids[plan.chunks[n].start : plan.chunks[n].end] for n in numbers]
                computed = self._chunks.behind(
                    self._prefix(front), ids, _STITCH_TOKENS, background=False, cancelled=cancelled
                )
                for number, chunk in zip(numbers, computed, strict=True):
                    filled[number] = chunk
            prefix = prefix or self._prefix(plan.prefix_ids)
        whole = [chunk for chunk in filled if chunk is not None]
        return stitch(plan, prefix, whole, self._tables, room + len(plan.open_positions))

    def generate(
        self,
        plan: Plan,
        stitched: Base | None,
        params: SamplingParams,
        cancelled: Callable[[], bool] = lambda: False,
        *,
        repair: torch.Tensor | None = None,
        prefix: PrefixRows | None = None,
        keep: Callable[[torch.Tensor, torch.Tensor], None] | None = None,
    ) -> Iterator[Step]:
        """Answer token by token.

        Args:
            plan: the prompt.
            stitched: of the same plan, for mode `reuse`; None for `exact`: full attention over the whole prompt,
                where only the prefix's rows are taken over.
            params: how tokens are chosen.
            cancelled: asked before every pass; once it says yes, the iterator ends without a last step.
            repair: positions of chunk tokens that are computed again over the base, as `select` gives them.
            prefix: for `exact`: the rows of the plan's prefix, where they are at hand.
            keep: for `exact`: told, after the answer, `k` (rotated) and `v` `[L, H, n, D]` of all that stands
                before the question; views, to be copied. Not told after an answer that was cancelled.

        Raises:
            RequestError: the prompt leaves no room for an answer.
        """
        self._check_fits(plan, 1)
        self._check_ids(plan.token_ids, "the prompt")
        return self._generate(plan, stitched, params, cancelled, repair, prefix, keep)

    @torch.inference_mode()
    def select(
        self,
        plan: Plan,
        base: Base,
        policy: Policy,
        budget: float,
        *,
        first_chunk_exact: bool = True,
        fused: bool = False,
        passes: PassMemo | None = None,
    ) -> torch.Tensor:
        """Which positions to repair: sorted, for `generate` and `logits`.

        Args:
            plan: the prompt.
            base: its stitched rows; only read, other requests may use it meanwhile.
            policy: see `engine.policies`.
            budget: share of all chunk tokens that may be repaired, 0 to 1.
            first_chunk_exact: rows were prefilled behind this prefix (variant `shared_prefix`), so that the first
                chunk's are those of a full prefill and nothing is spent on it.
            fused: rows were prefilled behind their neighbours (variants `fused`, `fused_company`).
            passes: what earlier calls with the same plan, base and `first_chunk_exact` found.

        Raises:
            InputError: the budget is not a share.
        """
        with self._turns.answering():
            found = passes or PassMemo()
            context = SelectionContext(plan, base, self.spec, self._look, first_chunk_exact, found, fused)
            return policy.select(context, budget)

    @torch.inference_mode()
    def logits(
        self, plan: Plan, stitched: Base | None, *, keep: int = 1, repair: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Logits of the last `keep` rows of the prompt (0: of all rows that are computed), `[keep, vocab]`, fp32."""
        self._check_fits(plan)
        rows, positions = self._open(plan, stitched, 0, repair)
        try:
            ids = torch.tensor(plan.token_ids)[positions]
            rows.begin(positions)
            with self._turns.answering(), self._turns.turn():
                return self._hf.logits(ids, positions, rows, keep).float().cpu()
        finally:
            rows.close()

    @contextmanager
    def session(
        self, plan: Plan, stitched: Base | None, *, repair: torch.Tensor | None = None, room: int = 64
    ) -> Iterator[Session]:
        """A prompt whose answer the caller chooses; arguments as of `generate`, `room` for the answer's rows."""
        self._check_fits(plan)
        self._check_ids(plan.token_ids, "the prompt")
        with self._turns.answering():
            rows, positions = self._open(plan, stitched, room, repair)
            try:
                yield Session(self._hf, self._turns, plan, rows, positions)
            finally:
                rows.close()

    def _generate(
        self,
        plan: Plan,
        base: Base | None,
        params: SamplingParams,
        cancelled: Callable[[], bool],
        repair: torch.Tensor | None,
        prefix: PrefixRows | None,
        keep: Callable[[torch.Tensor, torch.Tensor], None] | None,
    ) -> Iterator[Step]:
        with self._turns.answering():
            limit = min(params.max_tokens, self.max_tokens - plan.n_tokens)
            rows, positions = self._open(plan, base, limit, repair, prefix)
            try:
                done = yield from self._answers.steps(plan, rows, positions, params, limit, cancelled)
                if done and base is None and keep is not None:
                    keep(*rows.first(plan.segments[-1].start))
            finally:
                rows.close()

    @torch.inference_mode()
    def _open(
        self,
        plan: Plan,
        base: Base | None,
        n_answer: int,
        repair: torch.Tensor | None,
        prefix: PrefixRows | None = None,
    ) -> tuple[WorkingRows, torch.Tensor]:
        """Rows to work on, and the positions that are to be computed."""
        if base is not None and repair is not None and len(repair):
            positions = open_and_repaired(plan, check_repair(plan, repair))
            return base.open(len(positions) + n_answer, private=True), positions
        if base is not None:
            return base.open(len(plan.open_positions) + n_answer), torch.tensor(plan.open_positions)
        part = Part(self._like, plan.n_tokens + n_answer)
        if plan.prefix_ids:
            prefix = prefix or self._prefix(plan.prefix_ids)
            part.n = prefix.n_tokens
            part.k[:, :, : part.n], part.v[:, :, : part.n] = prefix.k, prefix.v
            part.positions[: part.n] = torch.arange(part.n)
        return Base(part).open(0), torch.arange(part.n, plan.n_tokens)

    def _look(self, ids: torch.Tensor, positions: torch.Tensor, rows: PassRows) -> None:
        """One turn for a pass of a selection policy, which may end it early."""
        with self._turns.turn():
            self._hf.look(ids, positions, rows)

    def _prefix(self, ids: tuple[int, ...]) -> PrefixRows:
        if ids:
            self._check_ids(ids, "the prefix")
        return self._prefixes.rows(ids)

    def _require_reuse(self) -> None:
        if self.reuse_refusal is not None:
            raise UnsupportedModelError(self.reuse_refusal)

    def _check_fits(self, plan: Plan, n_more: int = 0) -> None:
        if plan.n_tokens + n_more > self.max_tokens:
            raise RequestError(
                f"the prompt has {plan.n_tokens} tokens; the model takes {self.max_tokens}. Ask for fewer passages",
                code="context_length_exceeded",
            )

    def _check_ids(self, ids: Sequence[int], what: str) -> None:
        if not ids:
            raise InputError(f"{what} has no token ids; expected at least one")
        if min(ids) < 0 or max(ids) >= self.spec.vocab_size:
            raise InputError(
                f"{what} holds ids {min(ids)} to {max(ids)}; the model knows 0 to {self.spec.vocab_size - 1}"
            )
