"""The LLM's tokenizer: text to ids and back, without weights.

Text that somebody else wrote (chunks, questions) is encoded so that a special token spelled out in it stays
plain text; only the chat template, which is ours, may produce special tokens.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.models import model_folder
from schemas.errors import UnsupportedModelError
from schemas.ids import digest
from schemas.settings import ModelSettings

if TYPE_CHECKING:
    import tokenizers

_FIXED_DATE = "26 Jul 2024"  # what chat templates get for today's date: no clock in any identity
_FIXED_CLOCK = "{% macro strftime_now(format) %}" + _FIXED_DATE + "{% endmacro %}"


class Tokenizer:
    """One model's tokenizer. Safe to use from several threads.

    Attributes:
        digest: SHA-256 over the tokenizer, the chat template and the stop ids.
        plain: the `tokenizers.Tokenizer` that reads special tokens as text; for splitters. Do not change it.
        bos_ids: ids that the model expects in front of a text without chat template; often none.
        stop_ids: ids that end an answer.
    """

    def __init__(self, hf: Any, stop_ids: Sequence[int] = ()) -> None:
        """Wrap a fast tokenizer of transformers."""
        from tokenizers import Tokenizer as Backend

        if not getattr(hf, "is_fast", False):
            raise UnsupportedModelError(
                f"{type(hf).__name__} has no fast tokenizer, and character ranges need one; save a tokenizer.json"
            )
        self._hf = hf
        spelled = hf.backend_tokenizer.to_str()
        self._markup: tokenizers.Tokenizer = Backend.from_str(spelled)
        self.plain: tokenizers.Tokenizer = Backend.from_str(spelled)
        for backend in (self._markup, self.plain):
            backend.no_padding()
            backend.no_truncation()
        self.plain.encode_special_tokens = True
        self.bos_ids: tuple[int, ...] = tuple(_leading_specials(self._markup))
        eos = [] if hf.eos_token_id is None else [hf.eos_token_id]
        self.stop_ids: frozenset[int] = frozenset([*eos, *stop_ids])
        self.vocab_size: int = self.plain.get_vocab_size(with_added_tokens=True)
        self.chat_template: str | None = hf.chat_template if isinstance(hf.chat_template, str) else None
        self.digest = digest([self._markup.to_str(), self.chat_template, sorted(self.stop_ids)])

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, no special tokens added and none recognised."""
        ids: list[int] = self.plain.encode(text, add_special_tokens=False).ids
        return ids

    def encode_markup(self, text: str) -> list[int]:
        """Ids of template text: special tokens spelled out in it become their ids."""
        ids: list[int] = self._markup.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """The text of `ids`."""
        return str(self.plain.decode(list(ids), skip_special_tokens=skip_special))

    def render_chat(self, messages: list[dict[str, str]]) -> str | None:
        """The chat template over `messages`, ready for the assistant's turn; None without a template.

        Templates that print today's date get a fixed one.
        """
        if self.chat_template is None:
            return None
        rendered = self._hf.apply_chat_template(
            messages,
            tokenize=False,
            add_generation_prompt=True,
            enable_thinking=False,
            date_string=_FIXED_DATE,
            chat_template=_FIXED_CLOCK + self.chat_template,
        )
        return str(rendered)


def load_tokenizer(model: ModelSettings, cache: Path) -> Tokenizer:
    """The tokenizer of the LLM that the settings name.

    Raises:
        UnsupportedModelError: the model cannot be found, or has no fast tokenizer.
    """
    from transformers import AutoTokenizer

    folder = model_folder(model.name, cache)
    try:
        hf = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise UnsupportedModelError(f"{model.name}: the tokenizer cannot be loaded: {error}") from error
    return Tokenizer(hf, _stop_ids(folder))


def _leading_specials(backend: tokenizers.Tokenizer) -> list[int]:
    probe = "x"
    with_specials = backend.encode(probe, add_special_tokens=True).ids
    without = backend.encode(probe, add_special_tokens=False).ids
    return with_specials[: with_specials.index(without[0])] if without and without[0] in with_specials else []


def _stop_ids(folder: Path) -> list[int]:
    """End-of-sequence ids of the model's own configuration: one id or a list, in one of two files."""
    ids: list[int] = []
    for name in ("generation_config.json", "config.json"):
        if (folder / name).is_file():
            value = json.loads((folder / name).read_text()).get("eos_token_id")
            ids += value if isinstance(value, list) else [] if value is None else [value]
    return ids
