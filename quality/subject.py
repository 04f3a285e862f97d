"""What is evaluated: one model with its prompt, and the rows of passages in every prefill variant."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from engine import KvRows, Model, PromptTemplate, load_embedder, load_model, resolve_generation
from engine.variants import Variant, company_of, front_ids, prefill_variant
from quality.neighbours import Corpus, Embed
from quality.questions import Form, Passage, Question, QuestionSet, corpus_of
from quality.row_cache import CACHE_FORMAT, RowCache
from schemas.errors import InputError
from schemas.ids import artifact_key, token_digest
from schemas.settings import Settings

Note = Callable[[int, int], None]  # done, of how many


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
        """All passages of a set; embedded once."""
        name = f"{questions.name} {len(questions.questions)} {form.chunk_tokens}"
        if name not in self._corpora:
            embed, sha256 = self.embed()
            passages = corpus_of(questions.questions, form, self.template.tokenizer)
            self._corpora[name] = Corpus(passages, embed, sha256, self.cache, progress)
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

    def prepare(self, passages: Sequence[Passage], variant: Variant, corpus: Corpus | None) -> None:
        """Make the rows of a prompt's passages that are not on disk yet."""
        for number, passage in enumerate(passages):
            of = self._of(variant, number)
            if not self.cache.has(self._key(passage.ids, of, corpus)):
                self._rows(passage.ids, of, corpus)

    def load(self, passages: Sequence[Passage], variant: Variant, corpus: Corpus | None) -> list[KvRows]:
        """Rows of a prompt's passages, read from disk where they are there."""
        return [self._rows(passage.ids, self._of(variant, number), corpus) for number, passage in enumerate(passages)]

    def _of(self, variant: Variant, number: int) -> Variant:
        """The variant of the passage at that place: the first may be served from its pass 1."""
        return Variant("shared_prefix") if number == 0 and variant.pass1_first else variant

    def _rows(self, ids: tuple[int, ...], variant: Variant, corpus: Corpus | None) -> KvRows:
        key = self._key(ids, variant, corpus)

        def compute() -> KvRows:
            neighbours = self._neighbours(ids, variant, corpus)
            pass1 = Variant("pass1", front=variant.neighbours)
            (rows,) = prefill_variant(
                self.model,
                variant,
                self.template,
                [ids],
                lambda _: [self._rows(neighbour.ids, pass1, None) for neighbour in neighbours],
                company=self.company,
            )
            return rows

        return self.cache.rows(key, compute)

    def _key(self, ids: tuple[int, ...], variant: Variant, corpus: Corpus | None) -> str:
        front = variant.front_ids(self.template, self.company)
        pass1 = front_ids(variant.neighbours, self.template, self.company)
        fingerprint = self.model.fingerprint.digest
        neighbours = [
            artifact_key(fingerprint, token_digest(pass1), neighbour.ids)
            for neighbour in self._neighbours(ids, variant, corpus)
        ]
        return f"{artifact_key(fingerprint, token_digest(front), ids, neighbours)}-{CACHE_FORMAT}"

    def _neighbours(self, ids: tuple[int, ...], variant: Variant, corpus: Corpus | None) -> list[Passage]:
        """Nearest first; as many as fit into the model behind what stands in front."""
        if not variant.fused:
            return []
        assert corpus is not None, "fused variants need a corpus"
        room = self.model.max_tokens - len(variant.front_ids(self.template, self.company)) - len(ids)
        taken: list[Passage] = []
        for passage in corpus.nearest(ids, self.n_neighbours):
            room -= len(passage.ids)
            if room < 0:
                break
            taken.append(passage)
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
        embedder = load_embedder(settings.embedder, cache)
        return embedder.embed, embedder.sha256

    return Subject(
        model=model,
        template=identity.template,
        embed=embed,
        cache=RowCache(cache / "quality", settings.quality.cache_bytes, model.fingerprint),
        company=company_of(settings.prefill, identity.tokenizer),
        n_neighbours=settings.prefill.neighbours,
    )
