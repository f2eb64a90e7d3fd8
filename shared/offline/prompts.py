"""Prompts of the caller to token ids, checked before anything runs. Torch-free."""

import numbers
from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from finback.shared.codec.conversation import ConversationRenderer
from finback.shared.codec.tokenizer import Tokenizer
from finback.shared.offline.errors import InvalidInput

Prompt: TypeAlias = str | Sequence[int] | npt.NDArray[np.integer[Any]]
Prompts: TypeAlias = Prompt | Sequence[Prompt]
Message: TypeAlias = Mapping[str, Any]
Messages: TypeAlias = Sequence[Message] | Sequence[Sequence[Message]]

ROLES: Final = ("system", "developer", "user", "assistant", "tool")


def listed(prompts: Prompts) -> list[Prompt]:
    """One prompt (a text, or token ids) as a list of one; several as a list."""
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, np.ndarray):
        return [prompts] if prompts.ndim == 1 else list(prompts)
    if not isinstance(prompts, Sequence):
        raise InvalidInput(
            f"prompts must be a text, token ids, or a list of those, not {type(prompts).__name__}",
            param="prompts",
        )
    is_one = len(prompts) > 0 and isinstance(prompts[0], numbers.Integral)
    return [prompts] if is_one else list(prompts)  # type: ignore[list-item, arg-type]  # told apart by the first element


def listed_conversations(messages: Messages) -> list[Sequence[Message]]:
    """One conversation as a list of one; several as a list."""
    if isinstance(messages, (str, Mapping)) or not isinstance(messages, Sequence):
        raise InvalidInput("messages must be a list of messages", param="messages")
    is_one = len(messages) > 0 and isinstance(messages[0], Mapping)
    return [messages] if is_one else list(messages)  # type: ignore[list-item, arg-type]  # told apart by the first element


class PromptEncoder:
    """Texts, ids and conversations to checked ids; errors name the prompt and the limit."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        renderer: ConversationRenderer | None,
        *,
        vocab_size: int,
        max_model_len: int,
    ) -> None:
        self._tokenizer = tokenizer
        self._renderer = renderer
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len

    def ids(self, prompt: Prompt, name: str) -> tuple[int, ...]:
        """The ids of one prompt; an empty text is the beginning-of-text token where there is one."""
        if isinstance(prompt, str):
            return self._checked(self._encode(prompt, name), name)
        if not isinstance(prompt, (Sequence, np.ndarray)):
            raise InvalidInput(
                f"{name} must be a text or a list of token ids, not {prompt!r:.80}", param=name
            )
        for at, token_id in enumerate(prompt):
            self._check_id(token_id, f"{name}[{at}]")
        return self._checked([int(token_id) for token_id in prompt], name)

    def chat_ids(self, messages: Sequence[Message], name: str) -> tuple[int, ...]:
        """The ids of a conversation, rendered by the model's template for an answer."""
        self.check_text(name)
        if self._renderer is None:
            raise InvalidInput(f"{name}: this model has no chat template; use generate", param=name)
        _check_messages(messages, name)
        pieces = self._renderer.pieces(messages)
        return self._checked(self._tokenizer.encode_pieces(pieces), name)

    def _encode(self, text: str, name: str) -> list[int]:
        self.check_text(name)
        most = self._max_model_len * self._tokenizer.longest_token_bytes
        if len(text) > most:  # no need to encode what cannot fit
            raise InvalidInput(
                f"{name} has {len(text)} characters, more than fit in a context of "
                f"{self._max_model_len} tokens",
                param=name,
            )
        ids = self._tokenizer.encode_prompt(text)
        bos_id = self._tokenizer.bos_id
        return [bos_id] if not ids and bos_id is not None else ids

    def check_text(self, name: str) -> None:
        """Refuse what needs a tokenizer if the model has none."""
        if not self._tokenizer.has_text:
            raise InvalidInput(
                f"{name}: this model has no tokenizer; give token ids to generate", param=name
            )

    def _check_id(self, token_id: Any, name: str) -> None:
        if isinstance(token_id, bool) or not isinstance(token_id, numbers.Integral):
            raise InvalidInput(f"{name} must be a token id, not {token_id!r:.80}", param=name)
        if not 0 <= int(token_id) < self._vocab_size:
            raise InvalidInput(
                f"{name}: token id {token_id} is outside the vocabulary of {self._vocab_size}",
                param=name,
            )

    def _checked(self, ids: Sequence[int], name: str) -> tuple[int, ...]:
        if not ids:
            raise InvalidInput(f"{name} must not be empty", param=name)
        if len(ids) >= self._max_model_len:
            raise InvalidInput(
                f"{name} has {len(ids)} tokens, which leaves no room for an answer in a context "
                f"of {self._max_model_len}",
                param=name,
            )
        return tuple(ids)


def _check_messages(messages: Any, name: str) -> None:
    if isinstance(messages, str) or not isinstance(messages, Sequence) or not messages:
        raise InvalidInput(f"{name} must be a list of messages", param=name)
    for at, message in enumerate(messages):
        where = f"{name}[{at}]"
        if not isinstance(message, Mapping):
            raise InvalidInput(f"{where} must be a message, not {message!r:.80}", param=where)
        if message.get("role") not in ROLES:
            raise InvalidInput(
                f"{where}.role must be one of {', '.join(ROLES)}, not {message.get('role')!r:.80}",
                param=f"{where}.role",
            )
        content = message.get("content")
        is_parts = isinstance(content, Sequence) and all(isinstance(p, Mapping) for p in content)
        if content is not None and not isinstance(content, str) and not is_parts:
            raise InvalidInput(
                f"{where}.content must be a text or a list of parts, not {content!r:.80}",
                param=f"{where}.content",
            )
