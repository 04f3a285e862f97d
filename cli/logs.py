"""Logging of long-running commands: one line for each event, on stderr."""

from __future__ import annotations

import logging

# They say a line for every request or bundle, or warn about themselves.
NOISY = ("httpx", "httpcore", "kafka", "apache_beam", "uvicorn", "sentence_transformers", "transformers", "urllib3")


def set_up_logging(quiet: bool) -> None:
    """Our own modules from INFO (with `-q` from WARNING), libraries from WARNING."""
    logging.basicConfig(
        level=logging.WARNING if quiet else logging.INFO,
        format="%(asctime)s %(levelname).1s %(name)s: %(message)s",
        datefmt="%H:%M:%S",
    )
    for name in NOISY:
        logging.getLogger(name).setLevel(logging.WARNING)
