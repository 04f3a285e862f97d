"""Bodies of the HTTP API. Clients never send chunk text, token ids or KV."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictFloat, StrictInt, StrictStr, field_validator

from schemas.events import ContentType, Version
from schemas.head import DocumentState
from schemas.ids import writable

MAX_QUESTION_CHARS = 8_000


class CacheMode(StrEnum):
    """How much of the chunks' KV is taken from the store.

    `exact`: full attention over the whole prompt; only a true prefix is reused. `blend`: chunks are stitched, and
    repaired with a policy and a budget that the model's certificate allows; `exact` where it allows none. `reuse`:
    chunks are stitched and nothing is repaired.
    """

    EXACT = "exact"
    BLEND = "blend"
    REUSE = "reuse"


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid")


class _Request(_Body):
    @field_validator("*")
    @classmethod
    def _can_be_written(cls, value: object) -> object:
        return writable(value)  # nothing is changed silently, and nothing fails further in


class Question(_Request):
    """What both `/v1/retrieve` and `/v1/answer` take."""

    question: Annotated[str, Field(min_length=1, max_length=MAX_QUESTION_CHARS)]
    k: Annotated[int | None, Field(ge=1, le=64)] = None


class AnswerRequest(Question):
    """`POST /v1/answer`. Fields that are left out take the service's settings."""

    model: str | None = None
    cache_mode: CacheMode = CacheMode.REUSE
    policy: Annotated[str | None, Field(min_length=1, max_length=64)] = None  # only for `blend`
    budget: Annotated[float | None, Field(ge=0.0, le=1.0)] = None  # only for `blend`: share of chunk tokens
    stream: bool = False
    max_tokens: Annotated[int | None, Field(ge=1, le=4096)] = None
    temperature: Annotated[float, Field(ge=0.0, le=2.0)] = 0.0
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    seed: Annotated[int | None, Field(ge=0, lt=1 << 63)] = None


class Citation(_Body):
    """A chunk that was in the prompt: where it comes from and how well it matched."""

    tenant: str
    doc_id: str
    version: int
    chunk_id: str
    ordinal: int
    char_start: int
    char_end: int
    score: float
    title: str | None = None
    uri: str | None = None
    text: str
    source: str | None = None  # prefix (exact) | cached | fresh; unset by /v1/retrieve


class Usage(_Body):
    """Token counts; `reused + repaired + fresh == prompt_tokens`, always."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prefix_tokens: int = 0  # of the reused ones: exact, since everything in front of them was there too
    reused_tokens: int
    repaired_tokens: int
    fresh_tokens: int


class Timing(_Body):
    """Seconds, parts of `ttft_s` (request received to first token ready).

    Repaired rows, separators and question are computed in one pass: `repair_s` where something is repaired, else
    `first_step_s`.
    """

    retrieve_s: float
    load_s: float
    stitch_s: float
    select_s: float
    repair_s: float
    first_step_s: float
    ttft_s: float


class AnswerResponse(_Body):
    """`POST /v1/answer`, and the `done` event of its stream."""

    id: str
    model: str
    answer: str
    finish_reason: str  # stop | length
    cache_mode: CacheMode  # the mode that was really used
    policy: str  # the selection policy
    budget: float  # share of chunk tokens that it may have repaired; 0 for none, 1 for full
    citations: list[Citation]
    usage: Usage
    fallback: dict[str, int]  # reason -> chunks that were computed fresh, or served from pass 1, for it
    tiers: dict[str, int] = Field(default_factory=dict)  # tier -> chunks whose KV came from it: prefix, host, object
    timing: Timing
    note: str | None = None  # one sentence where the mode differs from the one asked for


class RetrieveResponse(_Body):
    """`POST /v1/retrieve`: visible chunks, best first."""

    chunks: list[Citation]
    retrieve_s: float


class DocumentBody(_Request):
    """`PUT /v1/documents/{id}`; the tenant comes from authentication."""

    content: str
    content_type: ContentType = ContentType.TEXT
    title: str | None = None
    uri: str | None = None
    metadata: dict[str, Any] = Field(default_factory=dict)
    version: Version | None = None


class Accepted(_Body):
    """The change was published; it is servable once `GET /v1/documents/{id}` shows it."""

    doc_id: str
    topic: str
    partition: int
    offset: int
    version: int | None  # None: the broker's timestamp and offset will be the version


class DeleteMany(_Request):
    """`POST /v1/documents/delete`: the documents whose metadata has all of `filter`, or, with `all`, every one.

    `all` wants the tenant's name in `confirm`. What is deleted is what is committed when it is asked for, at most
    `limit` documents at a time: ask again with `after` from the answer's `next` until that is null.
    """

    filter: dict[str, StrictStr | StrictBool | StrictInt | StrictFloat] = Field(default_factory=dict)
    all: bool = False
    confirm: str | None = None
    limit: Annotated[int, Field(ge=1, le=10_000)] = 1_000
    after: Annotated[str | None, Field(pattern="^[0-9a-f-]{36}$")] = None


class DeletedMany(_Body):
    """Each deletion as it was published; a receipt for each follows (`GET /v1/documents/{id}/receipt`)."""

    deletions: list[Accepted]
    next: str | None  # more may match: ask again with this as `after`


class DocumentStatus(_Body):
    """`GET /v1/documents/{id}`."""

    doc_id: str
    version: int
    state: DocumentState
    generation: str
    chunks: int  # points of the live version
    kv_ready: int  # of them with a confirmed KV artifact
    event_ms: int
    committed_ms: int
    title: str | None = None
    uri: str | None = None
    metadata: dict[str, Any] = Field(default_factory=dict)


class ErrorDetail(_Body):
    """OpenAI's error object."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(_Body):
    """What every non-2xx response carries."""

    error: ErrorDetail
