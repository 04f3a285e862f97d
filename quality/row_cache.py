"""Rows and reference answers on disk between runs, in full precision, within a number of bytes.

An evaluation touches hundreds of chunks whose rows take 27 MB each (600 tokens of a small model in fp32), and most
of them again in the next run. A file is named by everything that decides its content, so that nothing is ever stale;
the ones that were not read for longest go first.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from engine import KvRows
from schemas.fingerprint import Fingerprint

CACHE_FORMAT = 1  # raise it when the content of a file changes for the same name
_COUNTED = frozenset({".rows", ".npy", ".part"})  # the last are what killed runs left


class RowCache:
    """KV rows (`….rows`: the bytes of k, then of v) and other tensors (`….npy`) in one folder."""

    def __init__(self, folder: Path, max_bytes: int, fingerprint: Fingerprint) -> None:
        """Files of other runs in the folder count towards `max_bytes` too."""
        self._folder, self._max_bytes, self._fingerprint = folder, max_bytes, fingerprint
        self._folder.mkdir(parents=True, exist_ok=True)
        self._sizes = {file.name: file.stat().st_size for file in folder.iterdir() if file.suffix in _COUNTED}

    def rows(self, key: str, compute: Callable[[], KvRows]) -> KvRows:
        """The rows of that name, computed where they are not there."""
        found = self.read(key)
        if found is None:
            found = compute()
            self._write(f"{key}.rows", found.to_bytes())
        return found

    def has(self, key: str) -> bool:
        """Whether there are rows of that name."""
        return (self._folder / f"{key}.rows").is_file()

    def read(self, key: str) -> KvRows | None:
        """The rows of that name, or None."""
        data = self._load(f"{key}.rows")
        if data is None:
            return None
        half = len(data) // 2
        return KvRows.from_bytes(data[:half].data, data[half:].data, self._fingerprint)

    def tensor(self, key: str, compute: Callable[[], torch.Tensor]) -> torch.Tensor:
        """A tensor of that name, computed where it is not there."""
        file = self._folder / f"{key}.npy"
        try:
            found = torch.from_numpy(np.load(file, allow_pickle=False))
            os.utime(file)
            return found
        except (OSError, ValueError, EOFError):
            found = compute()
        header = np.lib.format
        with tempfile.TemporaryFile() as stream:
            header.write_array(stream, found.contiguous().numpy(), allow_pickle=False)
            stream.seek(0)
            self._write(file.name, (memoryview(stream.read()),))
        return found

    def _load(self, name: str) -> np.ndarray | None:
        file = self._folder / name
        try:
            data = np.fromfile(file, np.uint8)
            os.utime(file)  # the file system's clock says what was used last
            return data
        except OSError:
            return None

    def _write(self, name: str, parts: tuple[memoryview, ...]) -> None:
        size = sum(part.nbytes for part in parts)
        if size > self._max_bytes:
            return
        self._make_room(size)
        with tempfile.NamedTemporaryFile(dir=self._folder, suffix=".part", delete=False) as part:
            for piece in parts:
                part.write(piece)
        os.replace(part.name, self._folder / name)
        self._sizes[name] = size

    def _make_room(self, size: int) -> None:
        total = sum(self._sizes.values()) + size
        if total <= self._max_bytes:
            return
        for name in sorted(self._sizes, key=self._last_used):
            (self._folder / name).unlink(missing_ok=True)
            total -= self._sizes.pop(name)
            if total <= self._max_bytes:
                return

    def _last_used(self, name: str) -> float:
        try:
            return (self._folder / name).stat().st_mtime
        except OSError:
            return 0.0
