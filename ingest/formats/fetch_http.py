"""Content over HTTP(S), from addresses that were looked at before they are connected to.

A host name is resolved once, every address of it is judged, and the connection goes to the address that was judged,
with the name in `Host` and in TLS: a name that resolves to something else a moment later gains nothing. Proxies of the
environment are not used, since they would resolve the name again.
"""

from __future__ import annotations

import ipaddress
import socket
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING
from urllib.parse import urljoin

from ingest.formats.limits import check_length
from schemas.errors import EventError, FetchError
from schemas.places import HTTP_PORTS, Place
from schemas.settings import FetchSettings

if TYPE_CHECKING:
    import httpx

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

MAX_REDIRECTS = 3
_REDIRECTS = (301, 302, 303, 307, 308)
_LATER = (408, 425, 429)  # 4xx that another try may help against
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")


class HttpSource:
    """GET over connections of its own. Safe to use from several threads.

    Args:
        permitted: takes a URI apart and raises `EventError` where it is not allowed; judges redirects too.
    """

    def __init__(self, settings: FetchSettings, permitted: Callable[[str], Place]) -> None:
        self._settings, self._permitted = settings, permitted
        self._client: httpx.Client | None = None
        self._lock = threading.Lock()

    def read(self, place: Place) -> bytes:
        """The body at a place that is allowed.

        Raises:
            EventError: an address is private, there is nothing, it is too large, or redirects lead elsewhere.
            FetchError: no connection, no answer in time, or the server failed.
        """
        deadline = time.monotonic() + self._settings.timeout_s
        for _ in range(MAX_REDIRECTS + 1):
            body, following = self._get(place, deadline)
            if following is None:
                return body
            target = self._permitted(urljoin(url_of(place), following))
            if (target.host, target.port, target.scheme) != (place.host, place.port, place.scheme):
                raise EventError(f"{url_of(place)} redirects to another host, {target.host}; that is not followed")
            place = target
        raise EventError(f"{url_of(place)} redirects more than {MAX_REDIRECTS} times")

    def close(self) -> None:
        """Close the connections."""
        with self._lock:
            if self._client is not None:
                self._client.close()
                self._client = None

    def _get(self, place: Place, deadline: float) -> tuple[bytes, str | None]:
        """Body, or where a redirect points."""
        import httpx

        failure: Exception | None = None
        for address in self._addresses(place):
            try:
                return self._get_from(place, address, deadline)
            except httpx.ConnectError as error:  # the next address
                failure = error
            except httpx.HTTPError as error:
                failure = error
                break
        raise FetchError(f"{url_of(place)} cannot be fetched: {failure or 'no address'}") from failure

    def _get_from(self, place: Place, address: Address, deadline: float) -> tuple[bytes, str | None]:
        url, uri = url_of(place, address), url_of(place)
        host = place.host if place.port == HTTP_PORTS[place.scheme] else f"{place.host}:{place.port}"
        headers = {"Host": host, "Accept-Encoding": "identity"}
        extensions = {"sni_hostname": place.host} if place.scheme == "https" else {}
        with self._http().stream("GET", url, headers=headers, extensions=extensions) as response:
            if response.status_code in _REDIRECTS and "location" in response.headers:
                return b"", response.headers["location"]
            self._check_status(response.status_code, uri)
            if response.headers.get("content-encoding", "identity") != "identity":
                raise EventError(f"{uri} answers compressed though asked not to; its digest cannot be checked")
            length = response.headers.get("content-length", "")
            check_length(int(length) if length.isdigit() and len(length) < 19 else 0, self._settings, uri)
            body = bytearray()
            for part in response.iter_raw():
                body += part
                check_length(len(body), self._settings, uri)
                if time.monotonic() > deadline:
                    raise FetchError(f"{uri} took longer than events.fetch.timeout_s, {self._settings.timeout_s:g} s")
            return bytes(body), None

    def _check_status(self, status: int, uri: str) -> None:
        if status == 200:
            return
        if 400 <= status < 500 and status not in _LATER:
            raise EventError(f"{uri} cannot be fetched: the server answers {status}")
        if status < 400:
            raise EventError(f"{uri} cannot be fetched: the server answers {status}; expected 200")
        raise FetchError(f"{uri} cannot be fetched now: the server answers {status}")

    def _addresses(self, place: Place) -> list[Address]:
        """Every address of the host; all of them are public, or the host may have others."""
        try:
            found = socket.getaddrinfo(place.host, place.port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            raise FetchError(f"{place.host} cannot be resolved: {error}") from error
        addresses = [ipaddress.ip_address(str(sockaddr[0]).split("%")[0]) for *_, sockaddr in found]
        if place.host not in self._settings.private_hosts:
            for address in addresses:
                if not is_public(address):
                    raise EventError(
                        f"{place.host} resolves to {address}, which is no public address; "
                        "events.fetch.private_hosts would have to list it"
                    )
        return list(dict.fromkeys(addresses))

    def _http(self) -> httpx.Client:
        import httpx

        with self._lock:
            if self._client is None:
                timeout = httpx.Timeout(self._settings.timeout_s, connect=min(5.0, self._settings.timeout_s))
                limits = httpx.Limits(max_keepalive_connections=0)  # connections are of an address, not of a name
                self._client = httpx.Client(timeout=timeout, limits=limits, trust_env=False, follow_redirects=False)
            return self._client


def is_public(address: Address) -> bool:
    """Whether an address is one of the open internet, and so is every address that it embeds."""
    if isinstance(address, ipaddress.IPv6Address):
        embedded = address.ipv4_mapped or address.sixtofour
        if address.teredo is not None or (embedded is not None and not is_public(embedded)):
            return False
        if address in _NAT64:
            return is_public(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
        if address.ipv4_mapped is not None:
            return True
    return address.is_global and not address.is_multicast


def url_of(place: Place, address: Address | None = None) -> str:
    """The URL of a place; with an address, the one that is connected to."""
    host = place.host if address is None else str(address)
    host = f"[{host}]" if ":" in host else host
    port = "" if place.port == HTTP_PORTS[place.scheme] else f":{place.port}"
    query = f"?{place.query}" if place.query else ""
    return f"{place.scheme}://{host}{port}{place.path}{query}"
