"""One model is built at a time: transformers patches its own classes while it builds one, for every thread.

`from_pretrained` replaces `PreTrainedModel.tie_weights` with a function that does nothing and puts it back at its end
(transformers 5, initialization.py). Two at once may put back the wrong one, and from then on the tied output layer of
every model of the process stays without data.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

_ONE = threading.RLock()


@contextmanager
def building() -> Iterator[None]:
    """Hold this around whatever builds a transformers model; shows none of its progress bars."""
    from transformers.utils import logging

    with _ONE:
        showed_progress = logging.is_progress_bar_enabled()
        logging.disable_progress_bar()
        try:
            yield
        finally:
            if showed_progress:
                logging.enable_progress_bar()
