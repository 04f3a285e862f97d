"""Hugging Face publishes an optional package that is also imported as `kernels`. Only one of the two can be used."""

from __future__ import annotations

from importlib import metadata

from schemas.errors import SettingsError

FOREIGN_DISTRIBUTION = "kernels"


def refuse_foreign_kernels() -> None:
    """Stop at start-up where Hugging Face's `kernels` is installed: one would be imported in place of the other.

    Raises:
        SettingsError: the distribution `kernels` is installed; the message says what to do.
    """
    try:
        version = metadata.version(FOREIGN_DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return
    raise SettingsError(
        f"the Python package 'kernels' {version} from Hugging Face is installed and has the import name of a part of "
        "kvquilt; transformers does not need it: remove it (pip uninstall kernels) or use a virtual environment of "
        "its own for kvquilt"
    )
