"""KV artifacts in the object store, one object per chunk and model, below the folder of the chunk's document.

`kv/<generation>/<tenant digest>/<document digest>/<artifact key>.safetensors`: a document's KV is gone when its folder
is empty. Nothing is returned unchecked: whatever is wrong with an artifact is an `ArtifactMiss` with its reason.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from schemas import kv_artifact
from schemas.errors import ArtifactMiss, BlobError, MissReason
from schemas.ids import DocumentKey
from schemas.kv_artifact import ArtifactHeader, KvArtifact
from stores.blobs import Blobs

SUFFIX = ".safetensors"
_DEPTH = 5  # segments of an artifact's key
HEADER_PREFETCH_NBYTES = 16 * 1024  # a header of ours has 2 to 3 KB: one ranged read is enough


class KvStore:
    """The KV artifacts of one generation. Safe to use from several threads."""

    def __init__(self, blobs: Blobs, generation: str, header_prefetch_nbytes: int = HEADER_PREFETCH_NBYTES) -> None:
        self.generation = generation
        self._blobs = blobs
        self._prefetch = header_prefetch_nbytes

    @property
    def blobs(self) -> Blobs:
        """The object store that the artifacts are in."""
        return self._blobs

    def put(self, document: DocumentKey, key: str, artifact: KvArtifact) -> bool:
        """Write an artifact, whole and create-only.

        Returns:
            False where a sound one was there already. A damaged one is replaced.

        Raises:
            ValueError: the artifact belongs elsewhere, or `k` or `v` hold NaN or infinity: nothing is written.
            BlobError: it was not written.
        """
        header = artifact.header
        if header.document != document or header.generation != self.generation:
            raise ValueError(
                f"the artifact says document {header.document} and generation {header.generation}; "
                f"it was to be put under {document} and {self.generation}"
            )
        if not kv_artifact.is_finite(artifact):
            raise ValueError(
                f"artifact {key} of {document}: k or v holds NaN or infinity; the model's output is broken"
            )
        data = kv_artifact.encode(artifact)
        if self._blobs.put_new(self.path(document, key), data):
            return True
        try:
            self.get(
                document,
                key,
                fingerprint=header.fingerprint.digest,
                token_sha256=header.token_sha256,
                neighbours=[one.kv_key for one in header.neighbours],
            )
        except ArtifactMiss as miss:
            if miss.reason is MissReason.STORE:
                raise BlobError(str(miss)) from miss
            self._blobs.delete([self.path(document, key)])
            return self._blobs.put_new(self.path(document, key), data)
        return False

    def get(
        self, document: DocumentKey, key: str, *, fingerprint: str, token_sha256: str, neighbours: Sequence[str] = ()
    ) -> KvArtifact:
        """Read an artifact and check it; its tensors are views into the bytes that were read.

        Args:
            fingerprint: digest of the fingerprint in use.
            token_sha256: token digest of the chunk that is to be served.
            neighbours: keys of the chunks that it is to be fused with; none for rows of pass 1.

        Raises:
            ArtifactMiss: there is none that may be used.
        """
        artifact = kv_artifact.decode(self._read(document, key))
        if artifact.header.document != document:
            maker = str(artifact.header.document)[:200]
            raise ArtifactMiss(MissReason.FINGERPRINT, f"artifact {key} was made for {maker}, not for {document}")
        kv_artifact.check(
            artifact,
            generation=self.generation,
            fingerprint=fingerprint,
            token_sha256=token_sha256,
            neighbours=neighbours,
        )
        return artifact

    def inspect(self, document: DocumentKey, key: str) -> ArtifactHeader:
        """What an artifact says of itself, by a ranged read of its header; its payload is not checked.

        Raises:
            ArtifactMiss: there is none, or it has no readable header.
        """
        return self._inspect(self.path(document, key))

    def exists(self, document: DocumentKey, key: str) -> bool:
        """Whether there is an object of that name; its content is not checked. Raises `BlobError`."""
        return self._blobs.size(self.path(document, key)) is not None

    def keys(self, document: DocumentKey) -> list[str]:
        """Keys of every artifact of a document. Raises `BlobError`."""
        folder = self.folder(document) + "/"
        return [path[len(folder) :].removesuffix(SUFFIX) for path, _ in self._blobs.list(folder)]

    def nbytes(self, document: DocumentKey) -> int:
        """Bytes of every artifact of a document. Raises `BlobError`."""
        return sum(size for _, size in self._blobs.list(self.folder(document)))

    def staged(self, document: DocumentKey) -> int:
        """How many files killed writers left in a document's folder: no artifacts, but bytes of the document."""
        return self._blobs.staged(self.folder(document))

    def folders(self, tenant_digest: str | None = None) -> dict[tuple[str, str], list[str]]:
        """Keys of every artifact of this generation, by (tenant digest, document digest). Raises `BlobError`."""
        root = f"kv/{self.generation}" + (f"/{tenant_digest}" if tenant_digest is not None else "")
        found: dict[tuple[str, str], list[str]] = {}
        for path, _ in self._blobs.list(root):
            segments = path.split("/")
            if len(segments) == _DEPTH and path.endswith(SUFFIX):
                found.setdefault((segments[2], segments[3]), []).append(segments[4].removesuffix(SUFFIX))
        return found

    def maker(self, tenant_digest: str, document_digest: str, key: str) -> DocumentKey | None:
        """Whose artifact it is, by what it says of itself; None where that cannot be read or is another document's.

        Raises:
            BlobError: the store did not answer.
        """
        try:
            header = self._inspect(f"kv/{self.generation}/{tenant_digest}/{document_digest}/{key}{SUFFIX}")
        except ArtifactMiss as miss:
            if miss.reason is MissReason.STORE:
                raise BlobError(str(miss)) from miss
            return None
        return header.document if header.document.digest == document_digest else None

    def delete_folder(self, tenant_digest: str, document_digest: str) -> int:
        """Delete every artifact of a document that is known by its digests only; returns how many there were."""
        folder = f"kv/{self.generation}/{tenant_digest}/{document_digest}"
        self._blobs.sweep(folder)
        return self._blobs.delete([path for path, _ in self._blobs.list(folder)])

    def delete(self, document: DocumentKey, keys: Iterable[str]) -> int:
        """Delete these artifacts, and what killed writers left of any of the document's; an absent key is fine.

        Returns:
            How many of them were there.

        Raises:
            BlobError: some may be left: do it again.
        """
        self._blobs.sweep(self.folder(document))
        return self._blobs.delete(self.path(document, key) for key in keys)

    def folder(self, document: DocumentKey) -> str:
        """The folder that holds everything of a document."""
        return f"kv/{self.generation}/{document.tenant_digest}/{document.digest}"

    def path(self, document: DocumentKey, key: str) -> str:
        """The object's key in the store."""
        return f"{self.folder(document)}/{key}{SUFFIX}"

    def _inspect(self, path: str) -> ArtifactHeader:
        try:
            start = self._blobs.get_range(path, 0, self._prefetch)
            if start is None:
                raise ArtifactMiss(MissReason.MISSING, f"no artifact {path}")
            end = kv_artifact.header_end(start)
            if end > len(start):
                start += self._blobs.get_range(path, len(start), end) or b""
        except BlobError as error:
            raise ArtifactMiss(MissReason.STORE, str(error)) from error
        return kv_artifact.read_header(start)

    def _read(self, document: DocumentKey, key: str) -> memoryview:
        try:
            data = self._blobs.view(self.path(document, key))
        except BlobError as error:
            raise ArtifactMiss(MissReason.STORE, str(error)) from error
        if data is None:
            raise ArtifactMiss(MissReason.MISSING, f"no artifact {key} of {document}")
        return data
