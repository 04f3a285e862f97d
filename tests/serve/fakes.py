"""A service over real stores in memory and a scripted model: what the HTTP tests need to see and to hold up."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np

from engine import PromptTemplate
from schemas.certificate import Certificate, CertifiedRow, Conformance
from schemas.chunk import Chunk, IndexedChunk
from schemas.errors import BlobError, TopicError
from schemas.head import CommitRecord, DocumentState, Head
from schemas.ids import DocumentKey, artifact_key, canonical_bytes
from schemas.kv_artifact import ArtifactHeader, KvArtifact, payload_sha256
from schemas.settings import Settings
from serve import Parts
from serve.blend import Certificates
from stores import Blobs, KvStore, Message, VectorIndex, open_blobs, open_index
from stores.memory_topics import MemoryTopics
from tests.serve.scripted import (
    COVERS,
    DIM,
    FINGERPRINT,
    GENERATION,
    PREFIX,
    ByteTokenizer,
    LetterEmbedder,
    ScriptedModel,
)


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
