"""Which policy and budget an answer in mode `blend` may use: what the model's certificate allows."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from engine.policies import POLICIES, SERVED_LAYOUT, Policy, create_policy
from schemas.certificate import Certificate, CertifiedRow, Coverage, first_valid, pick
from schemas.errors import InputError, RequestError, StoreError

if TYPE_CHECKING:
    from schemas.api import AnswerRequest

_LOOK_AGAIN_S = 10.0  # without a valid certificate, how often the store is asked for one
_RENEW_S = 60.0  # and with one, whether there is another by now; no question waits for that


@dataclass(frozen=True)
class Choice:
    """What is spent on one prompt; `row` is the certified method that it rests on."""

    row: CertifiedRow
    budget: float

    @cached_property
    def policy(self) -> Policy:
        """The certified policy with its options."""
        return create_policy(self.row.policy, **self.row.options)


class Certificates:
    """The certificate that holds for what is served. The store is asked again; while it is away a valid one is kept.

    Args:
        covers: what is served.
        read: gives the certificates that there are, the generation's own first; in a thread.
    """

    def __init__(self, covers: Coverage, read: Callable[[], list[Certificate]]) -> None:
        self._covers, self._read = covers, read
        self._found: Certificate | None = None
        self._reason = ""
        self._looked_s = float("-inf")
        self._renewing: threading.Thread | None = None

    def current(self) -> tuple[Certificate | None, str]:
        """It, or None and a sentence that says why there is none."""
        now_s, found = time.monotonic(), self._found
        if now_s - self._looked_s >= (_LOOK_AGAIN_S if found is None else _RENEW_S):
            self._looked_s = now_s
            if found is None:
                self._look()
            elif self._renewing is None or not self._renewing.is_alive():
                self._renewing = threading.Thread(target=self._look, name="certificate", daemon=True)
                self._renewing.start()
        found = self._found
        return found, "" if found is not None else self._reason

    def _look(self) -> None:
        try:
            self._found, self._reason = first_valid(self._read(), self._covers)
        except StoreError as error:
            self._reason = f"the certificate cannot be read: {error}"


def check(body: AnswerRequest) -> None:
    """Refuse a policy that does not exist, and policy or budget in a mode that has none.

    Raises:
        RequestError: 400.
    """
    if body.policy is not None and body.policy not in POLICIES:
        known = ", ".join(POLICIES)
        raise RequestError(
            f"there is no selection policy {body.policy[:40]!r}; known are {known}",
            code="unknown_policy",
            param="policy",
        )
    for param, given in (("policy", body.policy), ("budget", body.budget)):
        if given is not None and body.cache_mode != "blend":
            raise RequestError(
                f"{param} is for cache_mode 'blend'; this request asks for {body.cache_mode.value!r}",
                code="invalid_value",
                param=param,
            )


def choose(
    certificate: Certificate, max_kl: float, variant: str, policy: str | None, budget: float | None
) -> Choice | str:
    """The cheapest certified method for rows of that variant, of those that the request allows.

    A policy may be given more budget than it was certified with, never less. Rows of policies that a served prompt
    cannot be repaired by are passed over.

    Returns:
        The choice; or, where the certificate allows none, a sentence that says what it allows.
    """
    usable = tuple(row for row in certificate.rows if _usable(row))
    certificate = certificate.model_copy(update={"rows": usable})
    allowed = [
        row
        for row in usable
        if policy in (None, row.policy) and (budget is None or row.budget <= budget or row.policy == "none")
    ]
    row = pick(certificate.model_copy(update={"rows": tuple(allowed)}), max_kl, variant)
    if row is not None:
        spent = row.budget if budget is None or row.policy == "none" else budget
        return Choice(row, spent)
    asked = "".join([f" of policy {policy}" if policy else "", "" if budget is None else f" within budget {budget:g}"])
    best = pick(certificate, max_kl, variant)
    told = f"the cheapest that is: {best.policy} at {best.budget:g}" if best else "nor is any other method"
    return f"no method{asked} is certified to stay under KL {max_kl:g} with rows of variant {variant}" + (
        f"; {told}" if asked else ""
    )


def _usable(row: CertifiedRow) -> bool:
    try:
        return create_policy(row.policy, **row.options).layout == SERVED_LAYOUT
    except InputError:  # of another release
        return False
