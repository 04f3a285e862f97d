"""A service over real stores in memory and a scripted model: what the HTTP tests need to see and to hold up."""

from __future__ import annotations

import json
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np
import torch

from engine import PromptTemplate, SamplingParams, Step
from engine.prefill import PrefixRows
from schemas.certificate import Certificate, CertifiedRow, Conformance, Coverage
from schemas.chunk import Chunk, IndexedChunk
from schemas.errors import BlobError, TopicError
from schemas.fingerprint import Fingerprint, Generation
from schemas.head import CommitRecord, DocumentState, Head
from schemas.ids import DocumentKey, artifact_key, canonical_bytes, token_digest
from schemas.kv_artifact import ArtifactHeader, KvArtifact, payload_sha256
from schemas.settings import Settings
from serve import Parts
from serve.blend import Certificates
from stores import Blobs, KvStore, Message, VectorIndex, open_blobs, open_index
from stores.memory_topics import MemoryTopics

DIM = 16
PREFIX = (1, 2, 3)


class ByteTokenizer:
    """One id per UTF-8 byte."""

    def encode(self, text: str) -> list[int]:
        return [byte + 10 for byte in text.encode()]


class LetterEmbedder:
    """Counts words by a checksum: texts that share words are near each other."""

    dim = DIM

    def embed_query(self, text: str) -> np.ndarray:
        vector = np.full(DIM, 1e-3, np.float32)
        for word in text.lower().split():
            vector[zlib.crc32(word.strip("?.,!").encode()) % DIM] += 1
        return vector / np.linalg.norm(vector)


FINGERPRINT = Fingerprint(
    model="scripted",
    weights_sha256="w",
    tokenizer_sha256="t",
    rope={"full": "r"},
    n_layers=1,
    n_kv_heads=1,
    head_dim=2,
    rotary_dim=2,
    rope_layout="half_split",
    dtype="float32",
    k_state="pre_rope",
    layout="LHTD",
)
GENERATION = Generation(
    fingerprint=FINGERPRINT,
    prefix_sha256=token_digest(PREFIX),
    front_sha256=token_digest(PREFIX),
    prefill_variant="shared_prefix",
    neighbours=0,
    embedder="letters",
    embedder_sha256="e",
    embedding_dim=DIM,
    chunker="test/1",
    chunk_max_tokens=512,
)


COVERS = Coverage(
    fingerprint=FINGERPRINT.digest, tokenizer_sha256="t", template_sha256="p", company_sha256="c", kvquilt="k"
)


@dataclass
class ScriptedModel:
    """Says its words one by one. `hold` keeps the next step back until it is set, or until it is cancelled."""

    words: Sequence[str] = ("It ", "is ", "so.")
    fingerprint: Fingerprint = FINGERPRINT
    reuse_refusal: str | None = None
    max_tokens: int = 4096
    hold_at: int | None = None
    hold: threading.Event = field(default_factory=threading.Event)
    held: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    stopped: threading.Event = field(default_factory=threading.Event)
    fails_at: int | None = None
    stitched_rows: list[int] = field(default_factory=list)
    fronts: list[Any] = field(default_factory=list)
    selected: list[tuple[str, float, bool]] = field(default_factory=list)
    prefixes: list[int] = field(default_factory=list)  # tokens of the exact prefix that was handed over
    exact_rows_last: bool = True
    repaired: list[int] = field(default_factory=list)
    calls: int = 0

    def stitch(
        self,
        plan: Any,
        rows: Sequence[Any],
        *,
        cancelled: Callable[[], bool] = lambda: False,
        fronts: Any = None,
        prefix: PrefixRows | None = None,
    ) -> object:
        assert prefix is None or prefix.n_tokens == len(plan.prefix_ids)
        self.fronts.append(fronts)
        self.stitched_rows.append(sum(row is not None for row in rows))
        return object()

    def select(
        self,
        plan: Any,
        stitched: object,
        policy: Any,
        budget: float,
        *,
        first_chunk_exact: bool = True,
        fused: bool = False,
    ) -> torch.Tensor:
        """The first tokens of the chunks behind the first, whatever the policy."""
        self.selected.append((policy.name, budget, first_chunk_exact))
        chunks = plan.chunks[1:] if first_chunk_exact else plan.chunks
        n = round(budget * sum(len(chunk) for chunk in plan.chunks))
        return torch.tensor([at for chunk in chunks for at in range(chunk.start, chunk.end)][:n], dtype=torch.int64)

    def generate(
        self,
        plan: Any,
        stitched: object | None,
        sampling: SamplingParams,
        cancelled: Callable[[], bool],
        *,
        repair: torch.Tensor | None = None,
        prefix: PrefixRows | None = None,
        keep: Callable[[torch.Tensor, torch.Tensor], None] | None = None,
    ) -> Iterator[Step]:
        self.calls += 1
        self.prefixes.append(0 if prefix is None else prefix.n_tokens)
        self.repaired.append(0 if repair is None else len(repair))
        words = self.words[: sampling.max_tokens]
        for n, word in enumerate(words):
            if n == self.fails_at:
                raise RuntimeError("the secret internals")
            if n == self.hold_at:
                self.held.release()
                while not self.hold.wait(0.002):
                    if cancelled():
                        self.stopped.set()
                        return
            last = n + 1 == len(words)
            yield Step(n, word, ("length" if len(words) < len(self.words) else "stop") if last else None)
        if stitched is None and keep is not None:
            rows = torch.tensor(plan.token_ids[: plan.segments[-1].start], dtype=torch.float32).view(1, 1, -1, 1)
            keep(rows, rows)


class ListPublisher:
    """A topic as a list."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.down = False

    def publish(self, topic: str, key: bytes | None, value: bytes | None, headers: Any = ()) -> Message:
        if self.down:
            raise TopicError("no broker at nowhere:9092")
        message = Message(topic, 0, len(self.messages), 1_700_000_000_000, key, value, tuple(headers))
        self.messages.append(message)
        return message

    def close(self) -> None:
        pass


class Corpus:
    """Writes documents the way ingest does: points, head, artifacts."""

    def __init__(self, index: VectorIndex, kv: KvStore) -> None:
        self.index, self.kv = index, kv
        self._embedder, self._tokenizer = LetterEmbedder(), ByteTokenizer()

    def put(
        self,
        doc_id: str,
        *texts: str,
        version: int = 1,
        tenant: str = "default",
        kv: bool = True,
        title: str | None = None,
    ) -> list[IndexedChunk]:
        chunks = self.points(doc_id, *texts, version=version, tenant=tenant, kv=kv, title=title)
        self.flip(doc_id, version, tenant=tenant, n_chunks=len(chunks), title=title)
        return chunks

    def points(
        self, doc_id: str, *texts: str, version: int, tenant: str = "default", kv: bool = True, title: str | None = None
    ) -> list[IndexedChunk]:
        document, start, chunks = DocumentKey(tenant, doc_id), 0, []
        for ordinal, text in enumerate(texts):
            ids = tuple(self._tokenizer.encode(text))
            chunk = Chunk(document, version, ordinal, text, start, start + len(text), ids)
            start += len(text)
            key = artifact_key(FINGERPRINT.digest, GENERATION.prefix_sha256, ids)
            chunks.append(IndexedChunk(chunk, key, self._embedder.embed_query(text)[None], kv, title))
            if kv:
                self.kv.put(document, key, self.artifact(chunk))
        self.index.upsert(chunks)
        return chunks

    def flip(
        self,
        doc_id: str,
        version: int,
        *,
        tenant: str = "default",
        n_chunks: int = 1,
        state: DocumentState = DocumentState.LIVE,
        title: str | None = None,
    ) -> None:
        self.index.flip(
            Head(
                tenant=tenant,
                doc_id=doc_id,
                version=version,
                state=state,
                generation=GENERATION.name,
                content_digest=str(version),
                n_chunks=n_chunks,
                event_ms=version,
                committed_ms=version,
                title=title,
            )
        )

    def artifact(self, chunk: Chunk) -> KvArtifact:
        ids = np.asarray(chunk.token_ids, np.int32)
        k, v = (np.full((1, 1, len(ids), 2), fill, np.float32).tobytes() for fill in (1.0, 2.0))
        header = ArtifactHeader(
            format_version=1,
            generation=GENERATION.name,
            fingerprint=FINGERPRINT,
            prefix_sha256=GENERATION.prefix_sha256,
            tenant=chunk.document.tenant,
            doc_id=chunk.document.doc_id,
            version=chunk.version,
            ordinal=chunk.ordinal,
            token_sha256=chunk.token_digest,
            payload_sha256=payload_sha256(k, v, ids),
        )
        return KvArtifact(header, k, v, ids)


class SlowBlobs(Blobs):
    """Counts whole reads; `gate` holds them until it is set."""

    def __init__(self, blobs: Blobs) -> None:
        self.__dict__.update(blobs.__dict__)
        self.gate, self.reads, self.fails = threading.Event(), [], "nothing"
        self.gate.set()

    def view(self, key: str) -> Any:
        self.reads.append(key)
        assert self.gate.wait(20)
        if self.fails in key:
            raise BlobError("the bucket answered 500")
        return super().view(key)


class Commits:
    """The commits topic in memory. `away`: the broker does not answer those who open it or read from it."""

    def __init__(self) -> None:
        self._topics = MemoryTopics(partitions=2)
        self._publisher = self._topics.publisher()
        self.away = False

    def publish(
        self,
        doc_id: str,
        version: int,
        state: DocumentState = DocumentState.LIVE,
        tenant: str = "default",
        generation: str = GENERATION.name,
    ) -> Message:
        """A commit record; returns the message."""
        record = CommitRecord(
            tenant=tenant, doc_id=doc_id, version=version, state=state, generation=generation, event_ms=version,
            committed_ms=version,
        )  # fmt: skip
        key = canonical_bytes([tenant, doc_id])
        return self._publisher.publish("commits", key, record.to_bytes())

    def open(self, positions: Mapping[int, int] | None) -> MemoryTail:
        """As `stores.tail.open_tail`."""
        if self.away:
            raise TopicError("no broker at nowhere:9092")
        reader = self._topics.reader("commits")
        reader.seek(reader.highwater() if positions is None else positions)
        return MemoryTail(self, reader)


class MemoryTail:
    """A `stores.tail.Tail`."""

    def __init__(self, commits: Commits, reader: Any) -> None:
        self._commits, self._reader = commits, reader
        self.last_contact_ms = reader.last_contact_ms
        self.position, self.close = reader.position, reader.close

    def poll(self, limit: int, timeout_s: float) -> list[Message]:
        if self._commits.away:
            self.last_contact_ms = 0
            time.sleep(0.01)
            return []
        messages = self._reader.poll(limit, 0.02)
        self.last_contact_ms = self._reader.last_contact_ms
        return messages


@dataclass
class Bench:
    """The parts of one service, and their handles."""

    parts: Parts
    model: ScriptedModel
    corpus: Corpus
    publisher: ListPublisher
    blobs: SlowBlobs
    certificates: list[Certificate]  # what the service finds; none at first
    commits: Commits


def certificate(*rows: tuple[str, str, float, float], **changes: str) -> Certificate:
    """A certificate with rows of (variant, policy, budget, kl); `changes` are of what it covers."""
    certified = [
        CertifiedRow(
            variant=variant,
            policy=policy,
            budget=budget,
            kl=kl,
            kl_high=kl,
            kl_first=kl,
            retention=None,
            asked=0,
            ttft_s=1.0,
            ttft_ratio=None,
        )
        for variant, policy, budget, kl in rows
    ]
    return Certificate(
        model="scripted",
        dtype="float32",
        covers=COVERS.model_copy(update=changes),
        checks=(Conformance(name="shift", passed=True),),
        questions=1,
        rows=tuple(certified),
    )


def make_bench(name: str, settings: Settings) -> Bench:
    index = open_index(settings.qdrant, f":memory:{name}", GENERATION.name, DIM)
    index.ensure()
    blobs = SlowBlobs(open_blobs(f"memory://{name}"))
    kv, model, publisher = KvStore(blobs, GENERATION.name), ScriptedModel(), ListPublisher()
    tokenizer: Any = ByteTokenizer()
    certificates: list[Certificate] = []
    commits = Commits()
    template = PromptTemplate(PREFIX, (4,), (5,), (6, 7), tokenizer)
    parts = Parts(
        generation=GENERATION,
        template=template,
        model=model,
        embedder=LetterEmbedder(),
        index=index,
        blobs=blobs,
        kv=kv,
        publisher=publisher,
        certificates=Certificates(COVERS, lambda: certificates),
        commits=commits.open,
        closers=(index.close,),
    )
    return Bench(parts, model, Corpus(index, kv), publisher, blobs, certificates, commits)


def events(response: httpx.Response) -> list[tuple[str, Any]]:
    """The server-sent events of a whole response."""
    frames = [frame.split("\n", 1) for frame in response.text.split("\n\n") if frame]
    return [(name.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for name, data in frames]


def until(condition: Callable[[], bool], what: str, timeout_s: float = 10.0) -> None:
    """Wait until `condition()` holds."""
    end_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end_s, f"still not after {timeout_s} s: {what}"
        time.sleep(0.005)


def metric(client: httpx.Client, sample: str) -> float:
    """The value of one sample of /metrics, such as `kvquilt_cancelled_total`."""
    for line in client.get("/metrics").text.splitlines():
        if line.startswith(sample + " "):
            return float(line.rsplit(" ", 1)[1])
    raise AssertionError(f"no sample {sample}")
