"""The model as the gateway knows it: names, limits, tokenizer, template. No weights."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import anyio

from finback.services.gateway.answer_events import Output
from finback.services.gateway.grammar import check_together, with_strictness
from finback.services.gateway.prompt_encoder import PromptEncoder
from finback.shared.clock import unix_s
from finback.shared.codec.control_tokens import ControlToken
from finback.shared.codec.dialogue import Conversation
from finback.shared.codec.encode_cache import DEFAULT_BYTES, EncodeCache, Encoded
from finback.shared.codec.output import OutputFormat, PlainFormat
from finback.shared.codec.prompts.prompt_format import PromptFormat
from finback.shared.codec.tokenizer import Tokenizer
from finback.shared.errors import InvalidRequest, NotFound
from finback.shared.kv.forget_scope import ForgetScope
from finback.shared.wire.messages.generate import GrammarSpec

# Longer texts are rendered, encoded and hashed on a thread: a millisecond is about this much.
OFF_LOOP_CHARS: Final = 2_000
# What one message costs beside its text, and one tool, in characters.
MESSAGE_CHARS: Final = 50
TOOL_CHARS: Final = 500


@dataclass(frozen=True, slots=True)
class Prompt:
    """An encoded prompt: int32 LE ids, and the chained hashes of its full blocks, joined."""

    token_ids: bytes
    block_hashes: bytes

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids) // 4


@dataclass(frozen=True, slots=True)
class Params:
    """How the fields are called that a length error names."""

    prompt: str
    max_tokens: str


class ServedModel:
    """One model under its name and aliases."""

    def __init__(
        self,
        *,
        name: str,
        aliases: Sequence[str],
        max_model_len: int,
        vocab_size: int,
        digest: str,
        block_size: int,
        tokenizer: Tokenizer,
        numerics: str,
        cluster_key: bytes = b"",
        encode_cache_bytes: int = DEFAULT_BYTES,
        output_format: OutputFormat | None = None,
        prompt_format: PromptFormat | None = None,
        grammar_strictness: str = "strict",
    ) -> None:
        """`grammar_strictness`: of schemas whose request does not say how strictly they are read."""
        self.name = name
        self.aliases = tuple(aliases)
        self.max_model_len = max_model_len
        self._model_limit = max_model_len
        self.vocab_size = vocab_size
        self.tokenizer = tokenizer
        self.created = int(unix_s())
        self.fingerprint = "fp_" + hashlib.sha256(f"{digest}/{numerics}".encode()).hexdigest()[:12]
        self._encoder = PromptEncoder(
            tokenizer,
            block_size=block_size,
            cluster_key=cluster_key,
            model_digest=digest,
            cache=EncodeCache(encode_cache_bytes),
        )
        self.format: OutputFormat = output_format or PlainFormat()
        self._strictness = grammar_strictness
        self._prompt = prompt_format

    def note_engine_limit(self, max_model_len: int) -> None:
        """What the largest engine can hold; 0: not known."""
        limit = self._model_limit
        self.max_model_len = min(limit, max_model_len) if max_model_len else limit

    def check_name(self, name: str) -> None:
        """Refuse a model that is not served here."""
        if name != self.name and name not in self.aliases:
            raise NotFound(
                f"The model '{name}' does not exist or is not served here; "
                f"this service serves '{self.name}'.",
                param="model",
                reason="model_not_found",
            )

    def card(self, name: str | None = None) -> dict[str, Any]:
        """The model object of `GET /v1/models`."""
        return {
            "id": name or self.name,
            "object": "model",
            "created": self.created,
            "owned_by": "finback",
            "root": self.name,
            "parent": None if name in (None, self.name) else self.name,
            "max_model_len": self.max_model_len,
            "output_format": self.format.name,
        }

    @property
    def has_text(self) -> bool:
        """False: the model has no tokenizer, so prompts and answers are token ids."""
        return self.tokenizer.has_text

    def check_text(self, param: str) -> None:
        """Refuse what needs a tokenizer if there is none."""
        if not self.has_text:
            raise InvalidRequest(
                f"The model '{self.name}' has no tokenizer: it takes prompts as token ids only, in "
                "/v1/completions.",
                param=param,
                reason="no_tokenizer",
            )

    def forget_prompts(self, scope: ForgetScope) -> int:
        """Drop what is remembered of encoded prompts; returns how many."""
        return self._encoder.forget(scope)

    # -- grammars

    def grammar(self, conversation: Conversation) -> GrammarSpec | None:
        """What the whole answer to a conversation is kept to; None: to nothing."""
        check_together(conversation)
        answer = self.as_asked(conversation.answer)
        return self.format.grammar(replace(conversation, answer=answer))

    def as_asked(self, grammar: GrammarSpec | None) -> GrammarSpec | None:
        """A grammar with a strictness, the service's own if the request says none."""
        return None if grammar is None else with_strictness(grammar, self._strictness)

    # -- conversations

    async def encode_conversation(self, conversation: Conversation, tenant: str) -> Prompt:
        """The prompt that asks for the next turn of a conversation."""
        self.check_text("messages")
        prompt = self._prompt
        if prompt is None:
            raise self._no_template()
        self._check_num_messages(len(conversation.turns))
        size = _size(conversation)
        self._refuse_hopeless(size, "messages")

        def encode() -> Prompt:
            try:
                pieces = prompt.render(conversation)
            except RecursionError as error:
                raise InvalidRequest(
                    "the messages or tools are nested too deeply", param="messages"
                ) from error
            return _prompt(self._encoder.encode(pieces, tenant))

        # A template is rendered turn by turn and tool by tool, be they empty.
        thought = sum(len(turn.reasoning) for turn in conversation.turns)
        framing = len(conversation.turns) * MESSAGE_CHARS + len(conversation.tools) * TOOL_CHARS
        return await _off_loop(encode, size + thought + framing)

    def output(self, conversation: Conversation) -> Output:
        """How the answer to a conversation is parsed."""
        known = self.tokenizer.control.by_spelling
        shown = {known[m].token_id: m.encode() for m in self.format.markers if m in known}
        return Output(new_parser=partial(self.format.parser, conversation), shown=shown)

    # -- prompts

    async def encode_text(self, text: str, tenant: str, param: str) -> Prompt:
        """Encode a bare prompt. An empty one becomes the beginning-of-text token."""
        self.check_text(param)
        self._refuse_hopeless(len(text), param)

        def encode() -> Prompt:
            bos_id = self.tokenizer.bos_id
            parts: list[str | ControlToken] = [text] if text else []
            if bos_id is not None and (self.tokenizer.adds_bos or not text):
                parts.insert(0, ControlToken(token_id=bos_id, spelling=""))
            return _prompt(self._encoder.encode(parts, tenant))

        prompt = await _off_loop(encode, len(text))
        if prompt.num_tokens == 0:
            raise InvalidRequest("the prompt must not be empty", param=param)
        return prompt

    def from_ids(self, token_ids: Sequence[int], tenant: str, param: str) -> Prompt:
        """A prompt given as ids."""
        self.check_ids(token_ids, param)
        return _prompt(self._encoder.hashed(token_ids, tenant))

    def check_ids(self, token_ids: Sequence[int], param: str) -> None:
        """Refuse ids that the vocabulary does not have."""
        for index, token_id in enumerate(token_ids):
            if token_id >= self.vocab_size:
                raise InvalidRequest(
                    f"token id {token_id} is outside the vocabulary of {self.vocab_size}",
                    param=f"{param}.{index}",
                )

    def check_length(self, num_prompt_tokens: int, max_tokens: int | None, params: Params) -> int:
        """The tokens that the answer may have; a prompt (or sum) over the context is refused."""
        room = self.max_model_len - num_prompt_tokens
        if room < 1:
            raise _too_long(
                f"This model's maximum context length is {self.max_model_len} tokens. However, "
                f"your prompt has {num_prompt_tokens} tokens, which leaves no room for an answer. "
                "Please shorten it.",
                params.prompt,
            )
        if max_tokens is not None and max_tokens > room:
            raise _too_long(
                f"This model's maximum context length is {self.max_model_len} tokens. However, "
                f"you requested {num_prompt_tokens + max_tokens} tokens ({num_prompt_tokens} in "
                f"the prompt, {max_tokens} for the answer). Please ask for at most {room}.",
                params.max_tokens,
            )
        return room

    def _no_template(self) -> InvalidRequest:
        return InvalidRequest(
            f"The model '{self.name}' has no chat template; use /v1/completions.",
            param="messages",
        )

    def _check_num_messages(self, num_messages: int) -> None:
        if num_messages > self.max_model_len:
            raise _too_long(
                f"This model's maximum context length is {self.max_model_len} tokens. However, "
                f"your conversation has {num_messages} messages, more than can fit.",
                "messages",
            )

    def _refuse_hopeless(self, num_chars: int, param: str) -> None:
        """No need to encode what cannot fit even if every token were the longest there is."""
        limit = self.max_model_len * self.tokenizer.longest_token_bytes
        if num_chars > limit:
            raise _too_long(
                f"This model's maximum context length is {self.max_model_len} tokens. However, "
                f"your prompt has {num_chars} characters, more than can fit.",
                param,
            )


def _prompt(encoded: Encoded) -> Prompt:
    return Prompt(encoded.token_ids, encoded.block_hashes)


def _too_long(message: str, param: str) -> InvalidRequest:
    return InvalidRequest(message, param=param, reason="context_length_exceeded")


async def _off_loop(encode: Any, num_chars: int) -> Prompt:
    if num_chars <= OFF_LOOP_CHARS:
        made: Prompt = encode()
        return made
    found: Prompt = await anyio.to_thread.run_sync(encode)
    return found


def _size(conversation: Conversation) -> int:
    """A lower bound of a prompt's characters, cheap to have."""
    turns = sum(
        len(turn.content) + sum(len(call.arguments) for call in turn.tool_calls)
        for turn in conversation.turns
    )
    tools = conversation.tools if conversation.tool_choice.mode != "none" else ()
    return turns + sum(len(tool.description) for tool in tools)
