"""The prompt as lists of ids: prefix | chunk | separator | chunk | separator | ... | question.

The chat template is rendered once, with marks where the passages and the question will be, and cut there. Every
piece becomes ids once; nothing is ever put together as text and tokenised again, because a piece may tokenise
differently in the middle of a text than alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from schemas.errors import SettingsError
from schemas.ids import token_digest
from schemas.settings import PromptSettings

if TYPE_CHECKING:
    from engine.tokenizer import Tokenizer

_PASSAGES, _QUESTION = "\ue0f0passages\ue0f1", "\ue0f0question\ue0f1"  # private-use characters: in no template
_LEAD = "Question:\n"


@dataclass(frozen=True)
class PromptTemplate:
    """The fixed ids of every prompt.

    Attributes:
        prefix_ids: in front of the first chunk; never empty. Chunks are prefilled behind it.
        separator_ids: after every chunk; part of no chunk.
        lead_ids, tail_ids: around the question's own ids; the tail opens the assistant's turn.
    """

    prefix_ids: tuple[int, ...]
    separator_ids: tuple[int, ...]
    lead_ids: tuple[int, ...]
    tail_ids: tuple[int, ...]
    tokenizer: Tokenizer

    @classmethod
    def from_settings(cls, tokenizer: Tokenizer, prompt: PromptSettings) -> PromptTemplate:
        """Cut the model's chat template, or a plain one where the model has none, into id lists.

        Raises:
            SettingsError: no prefix comes out, or the chat template drops or reorders the user's message.
        """
        rendered = _render(tokenizer, prompt.fixed_text)
        if rendered is None:
            head = [*tokenizer.bos_ids, *tokenizer.encode(prompt.fixed_text + prompt.separator)]
            lead, tail = tokenizer.encode(_LEAD), tokenizer.encode("\nAnswer:")
        else:
            before, _, rest = rendered.partition(_PASSAGES)
            between, _, after = rest.partition(_QUESTION)
            head = tokenizer.encode_markup(before)
            if tokenizer.bos_ids and tuple(head[: len(tokenizer.bos_ids)]) != tokenizer.bos_ids:
                head = [*tokenizer.bos_ids, *head]
            lead, tail = tokenizer.encode_markup(between), tokenizer.encode_markup(after)
        if not head:
            raise SettingsError("prompt.system is empty and the model adds no ids of its own; give it some text")
        return cls(tuple(head), tuple(tokenizer.encode(prompt.separator)), tuple(lead), tuple(tail), tokenizer)

    def question_ids(self, question: str) -> list[int]:
        """Everything after the last separator: lead, the question as plain text, tail."""
        return [*self.lead_ids, *self.tokenizer.encode(question), *self.tail_ids]

    @cached_property
    def prefix_sha256(self) -> str:
        """Token digest of the prefix; part of the generation and of every artifact key."""
        return token_digest(self.prefix_ids)


def _render(tokenizer: Tokenizer, system: str) -> str | None:
    """The chat template with marks, or None without one; systems go into the user's turn where they must."""
    user = f"{_PASSAGES}{_LEAD}{_QUESTION}"
    attempts = [[{"role": "user", "content": f"{system}\n\n{user}" if system else user}]]
    if system:
        attempts.insert(0, [{"role": "system", "content": system}, {"role": "user", "content": user}])
    fault: Exception | None = None
    for messages in attempts:
        try:
            rendered = tokenizer.render_chat(messages)
        except Exception as error:  # templates are programs: one that knows no system role raises what it likes
            fault = error
            continue
        if rendered is None:
            return None
        if system.strip() in rendered and -1 < rendered.find(_PASSAGES) < rendered.find(_QUESTION):
            return rendered
    raise SettingsError(
        f"the model's chat template does not render a user's message as it is ({fault or 'it drops or moves text'}); "
        "use another model"
    )
