"""Selection policies: which chunk tokens are computed again for one prompt. One small file each, one interface.

`create_policy("closure").select(context, budget)` gives sorted absolute positions; `Model.select` makes the context.
"""

from __future__ import annotations

from engine.policies.interface import Policy, ScoredPolicy
from engine.policies.registry import POLICIES, SERVED_LAYOUT, create_policy

__all__ = ["POLICIES", "SERVED_LAYOUT", "Policy", "ScoredPolicy", "create_policy"]
