"""The certificate of a generation, in the object store: `certificates/<generation>/<digest>.json`."""

from __future__ import annotations

from schemas.certificate import Certificate
from schemas.errors import InputError
from stores.blobs import Blobs


class CertificateStore:
    """Certificates of one generation. Objects are never overwritten: a new one is written, then the old ones go."""

    def __init__(self, blobs: Blobs, generation: str) -> None:
        self._blobs, self._folder = blobs, f"certificates/{generation}"

    def put(self, certificate: Certificate) -> str:
        """Write it and let the earlier ones go; returns its key. Raises `BlobError`: some may be left, do it again."""
        key = f"{self._folder}/{certificate.digest}.json"
        self._blobs.put_new(key, certificate.to_bytes())
        self._blobs.delete([old for old, _ in self._blobs.list(self._folder) if old != key])
        return key

    def all(self) -> list[Certificate]:
        """What is there, normally one or none; what cannot be read counts as none. Raises `BlobError`."""
        found = []
        for key, _ in self._blobs.list(self._folder):
            data = self._blobs.get(key)
            try:
                found += [] if data is None else [Certificate.from_bytes(data)]
            except InputError:  # of another release, or damaged: `kvquilt verify` writes it anew
                continue
        return found
