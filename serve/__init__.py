"""The HTTP service: retrieve -> visibility -> plan -> load -> stitch -> answer.

The door is lazy: importing it loads neither FastAPI nor torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from serve.app import create_app
    from serve.parts import Parts, build_parts
    from serve.server import BackgroundServer, run

__all__ = ["BackgroundServer", "Parts", "build_parts", "create_app", "run"]

_HOME = {
    "BackgroundServer": "serve.server",
    "Parts": "serve.parts",
    "build_parts": "serve.parts",
    "create_app": "serve.app",
    "run": "serve.server",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'serve' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOME[name]), name)
