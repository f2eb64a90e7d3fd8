"""From what a call was given to requests: each prompt with its own sampling, all checked first."""

import secrets
from collections.abc import Sequence

from finback.shared.offline.errors import InvalidInput
from finback.shared.offline.params import SamplingParams
from finback.shared.offline.prompts import (
    Messages,
    PromptEncoder,
    Prompts,
    listed,
    listed_conversations,
)
from finback.shared.offline.track import Request

Params = SamplingParams | Sequence[SamplingParams]

_SEED_BITS = 63


class RequestMaker:
    """Makes requests for a model. Raises `InvalidInput`, which names the field and the limit."""

    def __init__(self, encoder: PromptEncoder, *, vocab_size: int, max_model_len: int) -> None:
        self._encoder = encoder
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len

    def of_prompts(self, prompts: Prompts, params: Params | None) -> list[Request]:
        """Of texts and token ids."""
        encode = self._encoder.ids
        ids = [encode(prompt, f"prompts[{at}]") for at, prompt in enumerate(listed(prompts))]
        return self._requests(ids, params, "prompts")

    def of_messages(self, messages: Messages, params: Params | None) -> list[Request]:
        """Of conversations."""
        found = listed_conversations(messages)
        encode = self._encoder.chat_ids
        name = "messages" if len(found) == 1 and found[0] is messages else "messages[{}]"
        ids = [encode(chat, name.format(at)) for at, chat in enumerate(found)]
        return self._requests(ids, params, "messages")

    def _requests(
        self, prompts: Sequence[tuple[int, ...]], params: Params | None, name: str
    ) -> list[Request]:
        each = _one_a_prompt(params, len(prompts), name)
        return [
            self._request(at, ids, chosen, f"params[{at}]" if params is each else "params")
            for at, (ids, chosen) in enumerate(zip(prompts, each, strict=True))
        ]

    def _request(
        self, index: int, token_ids: tuple[int, ...], params: SamplingParams, name: str
    ) -> Request:
        room = self._max_model_len - len(token_ids)
        if params.max_tokens is not None and params.max_tokens > room:
            raise InvalidInput(
                f"{name}.max_tokens is {params.max_tokens}, but a prompt of {len(token_ids)} tokens "
                f"(the {_ordinal(index)} one) leaves room for {room} in a context of "
                f"{self._max_model_len}",
                param=f"{name}.max_tokens",
            )
        if params.max_tokens is None and params.min_tokens > room:
            raise InvalidInput(
                f"{name}.min_tokens is {params.min_tokens}, but there is room for {room} tokens",
                param=f"{name}.min_tokens",
            )
        self._check_ids(params, name)
        if params.stops:
            self._encoder.check_text(f"{name}.stop")
        return Request(
            index=index,
            token_ids=token_ids,
            sampling=params.spec(room),
            seed=secrets.randbits(_SEED_BITS) if params.seed is None else int(params.seed),
            stops=params.stops,
        )

    def _check_ids(self, params: SamplingParams, name: str) -> None:
        for field, ids in (
            ("stop_token_ids", params.stop_token_ids),
            ("logit_bias", params.logit_bias or ()),
        ):
            for token_id in ids:
                if token_id >= self._vocab_size:
                    raise InvalidInput(
                        f"{name}.{field}: token id {token_id} is outside the vocabulary of "
                        f"{self._vocab_size}",
                        param=f"{name}.{field}",
                    )


def _one_a_prompt(params: Params | None, num_prompts: int, name: str) -> Sequence[SamplingParams]:
    if params is None:
        params = SamplingParams()
    if isinstance(params, SamplingParams):
        return [params] * num_prompts
    if isinstance(params, str) or not isinstance(params, Sequence):
        raise InvalidInput(
            f"params must be SamplingParams or a list of them, not {type(params).__name__}",
            param="params",
        )
    if len(params) != num_prompts:
        raise InvalidInput(
            f"params has {len(params)} entries for {num_prompts} {name}; give one, or one each",
            param="params",
        )
    for at, chosen in enumerate(params):
        if not isinstance(chosen, SamplingParams):
            raise InvalidInput(
                f"params[{at}] must be SamplingParams, not {type(chosen).__name__}",
                param=f"params[{at}]",
            )
    return params


def _ordinal(index: int) -> str:
    return f"{index + 1}."
