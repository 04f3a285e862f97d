"""Logging of long-running commands: one line for each event, on stderr."""

from __future__ import annotations

import logging
import os

# They say a line for every request or bundle, or warn about themselves.
NOISY = ("httpx", "httpcore", "kafka", "apache_beam", "uvicorn", "sentence_transformers", "transformers", "urllib3")


def set_up_logging(quiet: bool) -> None:
    """Our own modules from INFO (with `-q` from WARNING), libraries from WARNING. Before they are imported."""
    logging.basicConfig(
        level=logging.WARNING if quiet else logging.INFO,
        format="%(asctime)s %(levelname).1s %(name)s: %(message)s",
        datefmt="%H:%M:%S",
    )
    logging.getLogger().handlers[0].addFilter(_worth_a_line)
    for name in NOISY:
        logging.getLogger(name).setLevel(logging.WARNING)
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # read by transformers when it is imported


def _worth_a_line(record: logging.LogRecord) -> bool:
    # Beam says so at import, on the root logger, to everybody who does not use Google's BigQuery
    return not (record.name == "root" and record.getMessage().startswith("apitools not found"))
