"""Where content may be fetched from: `scheme://host[:port][/folder]`, and whether a URI lies there.

Everything that could make two readers of one URI see two places is refused, not repaired: user names, dot segments
in any spelling, backslashes, white space, control characters.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote, urlsplit

HTTP_PORTS = {"http": 80, "https": 443}
SCHEMES = ("https", "http", "s3", "gs", "file")
_ODD = re.compile(r"[\s\\\x00-\x1f\x7f]")
_USERINFO = re.compile(r"(?<=//)[^/?#\s]*@")


@dataclass(frozen=True)
class Place:
    """A URI taken apart.

    Attributes:
        host: in lower case; the bucket of `s3` and `gs`, empty for `file`.
        port: 0 where the scheme has none.
        path: as it is sent, percent-escapes and all; starts with a slash.
        query: what follows the question mark.
    """

    scheme: str
    host: str
    port: int
    path: str
    query: str = ""

    @property
    def plain_path(self) -> str:
        """The path without percent-escapes."""
        return unquote(self.path)

    def holds(self, other: Place) -> bool:
        """Whether `other` is this place, or lies in this folder."""
        if (self.scheme, self.host, self.port) != (other.scheme, other.host, other.port):
            return False
        folder = self.plain_path.rstrip("/")
        return other.plain_path == folder or other.plain_path.startswith(folder + "/")


def split_place(uri: str) -> Place:
    """Take a URI apart.

    Raises:
        ValueError: it is no URI of a scheme that content is fetched by, or it can be read in two ways.
    """
    if _ODD.search(uri):
        raise ValueError("white space, control characters and backslashes must be percent-encoded")
    parts = urlsplit(uri)
    if parts.scheme not in SCHEMES:
        raise ValueError(f"the scheme must be one of {', '.join(SCHEMES)} (got {parts.scheme!r})")
    if parts.username is not None or parts.password is not None:
        raise ValueError("a user name or password in a URI is refused")
    host = parts.hostname or ""
    if parts.scheme == "file":
        if host not in ("", "localhost") or not parts.path.startswith("/"):
            raise ValueError("a file is named by three slashes and an absolute path: file:///folder/name")
        host = ""
    elif not host:
        raise ValueError("it names no host")
    port = parts.port or HTTP_PORTS.get(parts.scheme, 0)  # raises ValueError where it is no port
    path = parts.path or "/"
    try:
        plain = unquote(path, errors="strict")
    except UnicodeDecodeError as error:
        raise ValueError("its percent-escapes are not UTF-8") from error
    if _ODD.search(plain.replace(" ", "")) or any(segment in (".", "..") for segment in plain.split("/")):
        raise ValueError("the path holds a dot segment, a backslash or a control character")
    return Place(parts.scheme, host, port, path, parts.query)


def check_place(place: str) -> None:
    """Raise `ValueError` where `place` cannot stand in an allow-list."""
    try:
        parts = split_place(place)
    except ValueError as error:
        raise ValueError(f"{place!r}: {error}; expected scheme://host[:port][/folder]") from error
    if parts.query or "#" in place or "*" in parts.host:
        raise ValueError(f"{place!r}: expected scheme://host[:port][/folder], without wildcards, query or fragment")


def without_userinfo(text: str) -> str:
    """The text with user name and password taken out of every URL in it."""
    return _USERINFO.sub("", text)


def all_without_userinfo(value: Any) -> Any:
    """The same for every text in plain values, names of fields included."""
    if isinstance(value, dict):
        return {without_userinfo(name): all_without_userinfo(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [all_without_userinfo(inner) for inner in value]
    return without_userinfo(value) if isinstance(value, str) else value
