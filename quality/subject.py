"""What is evaluated: one model with its prompt, and the rows of passages in every prefill variant."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from engine import KvRows, Model, PromptTemplate, load_embedder, load_model, resolve_generation
from engine.variants import Variant, company_of, front_ids, prefill_variant
from quality.neighbours import Corpus, Embed
from quality.questions import Form, Ids, Passage, Question, QuestionSet, corpus_of
from quality.row_cache import CACHE_FORMAT, RowCache
from schemas.errors import InputError
from schemas.ids import artifact_key, token_digest
from schemas.settings import Settings

Note = Callable[[int, int], None]  # done, of how many
NeighboursOf = Callable[[Ids], Sequence[Ids]]  # a chunk's, the one that comes next to it first


@dataclass
class Subject:
    """A model, and what of it is kept between runs.

    Attributes:
        company: ids of the company, for the variants that have one.
        n_neighbours: how many a fused chunk has, at most.
    """

    model: Model
    template: PromptTemplate
    embed: Callable[[], tuple[Embed, str]]  # texts -> vectors, and the encoder's SHA-256; called when needed
    cache: RowCache
    company: tuple[int, ...]
    n_neighbours: int = 10
    _corpora: dict[str, Corpus] = field(default_factory=dict, repr=False)

    def corpus(self, questions: QuestionSet, form: Form, progress: Note = lambda done, total: None) -> Corpus:
        """All passages of a set; embedded once, when it is asked for neighbours."""
        name = f"{questions.name} {len(questions.questions)} {form.chunk_tokens}"
        if name not in self._corpora:
            passages = corpus_of(questions.questions, form, self.template.tokenizer)
            self._corpora[name] = Corpus(passages, self.embed, self.cache, progress)
        return self._corpora[name]

    def prompt_passages(self, question: Question, form: Form) -> list[Passage]:
        """The passages of a question's prompt.

        Raises:
            InputError: one of them has no tokens.
        """
        passages = form.prompt_passages(question, self.template.tokenizer)
        if not all(passage.ids for passage in passages):
            raise InputError(f"question {question.id}: a passage has no tokens")
        return passages

    def prepare(
        self, passages: Sequence[Passage], variant: Variant, neighbours_of: NeighboursOf = lambda _: ()
    ) -> None:
        """Make the rows of a prompt's passages that are not on disk yet; neighbours count where it is fused."""
        for number, passage in enumerate(passages):
            of = self._of(variant, number)
            neighbours = self._fitting(passage.ids, of, neighbours_of)
            if not self.cache.has(self._key(passage.ids, of, neighbours)):
                self._rows(passage.ids, of, neighbours)

    def load(
        self, passages: Sequence[Passage], variant: Variant, neighbours_of: NeighboursOf = lambda _: ()
    ) -> list[KvRows]:
        """Rows of a prompt's passages, read from disk where they are there."""
        kinds = [(passage.ids, self._of(variant, number)) for number, passage in enumerate(passages)]
        return [self._rows(ids, of, self._fitting(ids, of, neighbours_of)) for ids, of in kinds]

    def _of(self, variant: Variant, number: int) -> Variant:
        """The variant of the passage at that place: the first may be served from its pass 1."""
        return Variant("shared_prefix") if number == 0 and variant.pass1_first else variant

    def _rows(self, ids: Ids, variant: Variant, neighbours: Sequence[Ids]) -> KvRows:
        def compute() -> KvRows:
            pass1 = Variant("pass1", front=variant.neighbours)
            (rows,) = prefill_variant(
                self.model,
                variant,
                self.template,
                [ids],
                lambda _: [self._rows(neighbour, pass1, ()) for neighbour in neighbours],
                company=self.company,
            )
            return rows

        return self.cache.rows(self._key(ids, variant, neighbours), compute)

    def _key(self, ids: Ids, variant: Variant, neighbours: Sequence[Ids]) -> str:
        front = variant.front_ids(self.template, self.company)
        pass1 = front_ids(variant.neighbours, self.template, self.company)
        fingerprint = self.model.fingerprint.digest
        keys = [artifact_key(fingerprint, token_digest(pass1), neighbour) for neighbour in neighbours]
        return f"{artifact_key(fingerprint, token_digest(front), ids, keys)}-{CACHE_FORMAT}"

    def _fitting(self, ids: Ids, variant: Variant, neighbours_of: NeighboursOf) -> list[Ids]:
        """As many neighbours as fit into the model behind what stands in front; none where it is not fused."""
        if not variant.fused:
            return []
        room = self.model.max_tokens - len(variant.front_ids(self.template, self.company)) - len(ids)
        taken: list[Ids] = []
        for neighbour in neighbours_of(ids):
            room -= len(neighbour)
            if room < 0:
                break
            taken.append(neighbour)
        return taken


def load_subject(settings: Settings) -> Subject:
    """The model that the settings name, with its packaged or own company.

    Raises:
        UnsupportedModelError: the model cannot be loaded, or its rows cannot be reused.
        SettingsError: the company's file cannot be read.
    """
    identity = resolve_generation(settings)
    cache = settings.cache_folder
    model = load_model(settings.model, cache)

    def embed() -> tuple[Embed, str]:
        # float32 on every machine: who is whose neighbour must not hang on rounding
        embedder = load_embedder(settings.embedder.model_copy(update={"dtype": "float32"}), cache)
        return embedder.embed, embedder.sha256

    return Subject(
        model=model,
        template=identity.template,
        embed=embed,
        cache=RowCache(cache / "quality", settings.quality.cache_bytes, model.fingerprint),
        company=company_of(settings.prefill, identity.tokenizer),
        n_neighbours=settings.prefill.neighbours,
    )
