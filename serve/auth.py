"""`Authorization: Bearer <key>` -> tenant. The tenant never comes from a request's fields."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from schemas.errors import RequestError
from schemas.events import DEFAULT_TENANT


class Authenticator:
    """Knows the keys by their SHA-256, so that neither a dump nor the time of a look-up tells one.

    Args:
        api_keys: key -> tenant. Empty: every caller is the tenant `default`.
    """

    def __init__(self, api_keys: Mapping[str, str]) -> None:
        self._tenants = {_digest(key): tenant for key, tenant in api_keys.items()}

    @property
    def open(self) -> bool:
        """Whether callers need no key."""
        return not self._tenants

    def tenant(self, authorization: str | None) -> str:
        """The tenant of a request.

        Args:
            authorization: the value of the header, if there was one. Ignored where callers need no key.

        Raises:
            RequestError: 401; no key, or one that is not known.
        """
        if self.open:
            return DEFAULT_TENANT
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise RequestError("no API key; send `Authorization: Bearer <key>`", status=401, code="missing_api_key")
        tenant = self._tenants.get(_digest(key.strip()))
        if tenant is None:
            raise RequestError("the API key is not known", status=401, code="invalid_api_key")
        return tenant


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()
