"""An answer does not depend on how its tokens were cut into steps; checked against a slow twin."""

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from finback.shared.codec import gguf_tokenizer
from finback.shared.engine.output import SequenceOutput
from finback.shared.offline.outputs import Completion, CompletionChunk
from finback.shared.offline.track import Request, Track
from finback.shared.wire.messages.generate import EndInfo, SamplingSpec, TokenLogprob
from support.tiny_folders import ascii_vocabulary

SPELLINGS, TYPES, MERGES = ascii_vocabulary()
TOKENIZER = gguf_tokenizer.build(
    read_tokens=lambda: SPELLINGS,
    read_merges=lambda: MERGES,
    read_token_types=lambda: TYPES,
    pre="smollm",
    bos_id=None,
    eos_ids=(2,),
    adds_bos=False,
)
A, B, TH, T, END = 68, 69, 95, 87, 2

TOKENS = st.lists(st.sampled_from([A, B, TH, T]), min_size=1, max_size=12)
STOPS = st.lists(st.text("abth", min_size=1, max_size=3), max_size=3)


def twin(tokens: list[int], stops: list[str], min_tokens: int) -> tuple[list[int], str, str | None]:
    """(tokens, text, stop string) by looking at every beginning of the answer."""
    skipped = "".join(SPELLINGS[token] for token in tokens[: max(0, min_tokens - 1)])
    for count in range(max(1, min_tokens), len(tokens) + 1):
        text = "".join(SPELLINGS[token] for token in tokens[:count])
        seen = text[len(skipped) :]
        found = [(seen.index(s) + len(s), -len(s), s) for s in stops if s in seen]
        if found:
            end, _, stop = min(found)
            return tokens[:count], text[: len(skipped) + end - len(stop)], stop
    return tokens, "".join(SPELLINGS[token] for token in tokens), None


def _rows(tokens: list[int], cuts: list[int], end: EndInfo) -> list[SequenceOutput]:
    ids = [*tokens, *([end.stop_token_id] if end.stop_token_id is not None else [])]
    edges = sorted({0, len(ids), *(cut % (len(ids) + 1) for cut in cuts)})
    rows = []
    for low, high in itertools.pairwise(edges):
        rows.append(
            SequenceOutput(
                key=("r", 0),
                attempt=1,
                offset=low,
                token_ids=np.array(ids[low:high], dtype=np.int32),
                logprobs=tuple(TokenLogprob(logprob=float(-at)) for at in range(low, high)),
                end=end if high == len(ids) else None,
            )
        )
    return rows


def _run(
    request: Request, rows: list[SequenceOutput], *, is_streamed: bool
) -> tuple[Completion, list[CompletionChunk]]:
    track = Track(request, TOKENIZER, is_streamed=is_streamed)
    chunks = []
    for row in rows:
        chunks.append(track.push(row))
        if track.is_over:
            break
    return track.completion(), chunks


@given(
    tokens=TOKENS,
    stops=STOPS,
    cuts=st.lists(st.integers(0, 12), max_size=5),
    min_tokens=st.integers(0, 4),
    has_stop_token=st.booleans(),
    is_streamed=st.booleans(),
)
def test_any_cut_gives_the_twins_answer(
    tokens: list[int],
    stops: list[str],
    cuts: list[int],
    min_tokens: int,
    has_stop_token: bool,
    is_streamed: bool,
) -> None:
    sampling = SamplingSpec(num_logprobs=0, min_tokens=min_tokens, max_tokens=16)
    request = Request(index=3, token_ids=(A,), sampling=sampling, seed=0, stops=tuple(stops))
    end = EndInfo(
        finish_reason="stop" if has_stop_token else "length",
        stop_token_id=END if has_stop_token else None,
    )
    completion, chunks = _run(request, _rows(tokens, cuts, end), is_streamed=is_streamed)
    kept, text, stop = twin(tokens, stops, min_tokens)
    if stop is None and has_stop_token:
        kept = [*kept, END]
    assert (list(completion.token_ids), completion.text) == (kept, text)
    assert completion.stop_reason == stop
    assert completion.finish_reason == ("stop" if stop or has_stop_token else "length")
    assert completion.logprobs is not None
    assert [entry.logprob for entry in completion.logprobs] == [
        float(-at) for at in range(len(kept))
    ]
    if is_streamed:
        assert sum((chunk.token_ids for chunk in chunks), ()) == completion.token_ids
        assert "".join(chunk.text for chunk in chunks) == completion.text
        assert chunks[-1].finish_reason == completion.finish_reason
