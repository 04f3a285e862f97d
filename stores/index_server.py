"""A vector index of one process, used by others on this machine: for tests and benches where no Qdrant server is.

Qdrant's local mode is one process's. Calls travel as pickles over loopback, behind a key that only who is told it has.
"""

from __future__ import annotations

import os
import threading
from multiprocessing.connection import Client, Connection, Listener
from typing import Any, Self

from schemas.errors import VectorIndexError

Address = tuple[str, int, str]  # host, port, key in hex


class IndexServer:
    """Answers calls on `index` while it is open, each client in a thread of its own."""

    def __init__(self, index: Any) -> None:
        self._index = index
        key = os.urandom(32)
        self._listener = Listener(("127.0.0.1", 0), authkey=key)
        host, port = self._listener.address
        self.address: Address = (str(host), int(port), key.hex())
        self._closing = False
        self._accepting = threading.Thread(target=self._accept, daemon=True)

    def __enter__(self) -> Self:
        self._accepting.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing = True
        connect(self.address).close()  # wakes the one who accepts
        self._accepting.join()
        self._listener.close()

    def _accept(self) -> None:
        while True:
            connection = self._listener.accept()
            if self._closing:
                connection.close()
                return
            threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: Connection) -> None:
        with connection:
            while True:
                try:
                    name, args, kwargs = connection.recv()
                except (EOFError, OSError):  # the client is gone
                    return
                try:
                    found = getattr(self._index, name)(*args, **kwargs)
                    answer = True, list(found) if hasattr(found, "__next__") else found
                except Exception as error:
                    answer = False, error
                connection.send(answer)


class RemoteIndex:
    """Calls the index that `IndexServer` serves; a method's iterator comes back as a list."""

    def __init__(self, address: Address) -> None:
        self._connection = connect(address)
        self._lock = threading.Lock()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)

        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                with self._lock:
                    self._connection.send((name, args, kwargs))
                    done, answer = self._connection.recv()
            except (EOFError, OSError) as error:
                raise VectorIndexError(f"the index server is gone: {error!r}") from error
            if not done:
                raise answer
            return answer

        return call

    def close(self) -> None:
        """Let go of the connection; the index stays open."""
        self._connection.close()


def connect(address: Address) -> Connection:
    """A connection to a server of this module."""
    host, port, key = address
    return Client((host, port), authkey=bytes.fromhex(key))
