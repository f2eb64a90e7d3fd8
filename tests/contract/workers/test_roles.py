"""The prefill and decode roles over a real bus and the real cache service, engines without a model."""

import asyncio
import dataclasses
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

from finback.services.cache.service import CacheService
from finback.shared.actor.endpoint import Call
from finback.shared.actor.service import Service
from finback.shared.engine.token_chunks import split_token_ids
from finback.shared.errors import Cancelled, ServingError
from finback.shared.wire.messages.decode import (
    EndAck,
    HandoffReply,
    HandoffRequest,
    ReserveReply,
    ReserveRequest,
    ResumeReply,
    ResumeRequest,
)
from finback.shared.wire.messages.draft import Draft, DraftReply, DraftRequest
from finback.shared.wire.messages.generate import GrammarSpec
from finback.shared.wire.messages.prefill import PrefillAccepted, PrefillRequest, TokenChunk
from finback.shared.wire.messages.sampler import Mask, MaskReply, MaskRequest
from support.fake_engine import BLOCK_SIZE, expected, kv_of
from support.nats_server import NatsServer
from support.role_stack import PROMPT, pair, sampling, stack, until
from support.worker_stack import Generation

pytestmark = pytest.mark.nats


@pytest.mark.parametrize("num_prompt", [1, 2, BLOCK_SIZE, BLOCK_SIZE + 1, 39])
@pytest.mark.parametrize("layout", ["arena", "no-cache", "co-hosted"])
async def test_every_way_gives_the_same_tokens(
    nats_server: NatsServer, subject_prefix: str, tmp_path: Path, layout: str, num_prompt: int
) -> None:
    async with stack(nats_server, subject_prefix, tmp_path) as (made, gateway):
        if layout == "co-hosted":
            await made.worker("prefill", "decode")
        else:
            if layout == "arena":
                await made.start(CacheService)
            prefill, decode = await made.worker("prefill"), await made.worker("decode")
        prompt = PROMPT[:num_prompt]
        generation = await gateway.generate(prompt, sampling())
        assert generation.tokens == expected(prompt, 1, 20)
        assert generation.end.finish_reason == "length"
        assert generation.answers[0].num_ends == 1
        if layout != "co-hosted":
            lane = "shm" if layout == "arena" else "nats"
            taken = decode.metrics.value("finback.decode.blocks_taken", lane=lane)
            assert taken == -(-(num_prompt - 1) // BLOCK_SIZE)
            assert made.engines[decode.instance].num_recomputed == 0
            await until(lambda: not made.engines[prefill.instance].sequences)


async def test_choices_get_their_own_seeds(
    nats_server: NatsServer, subject_prefix: str, tmp_path: Path
) -> None:
    async with stack(nats_server, subject_prefix, tmp_path) as (made, gateway):
        await made.worker("prefill")
        await made.worker("decode")
        generation = await gateway.generate(PROMPT, sampling(), seeds=(5, 6, 7))
        for index, seed in enumerate((5, 6, 7)):
            assert generation.answers[index].tokens == expected(PROMPT, seed, 20)
            assert generation.answers[index].num_ends == 1


async def test_logprobs_travel_with_their_tokens(
    nats_server: NatsServer, subject_prefix: str, tmp_path: Path
) -> None:
    async with stack(nats_server, subject_prefix, tmp_path) as (made, gateway):
        await made.worker("prefill", "decode")
        spec = dataclasses.replace(sampling(), num_logprobs=0)
        generation = await gateway.generate(PROMPT, spec)
        assert generation.answers[0].logprobs == [-0.5] * 20


async def test_long_prompts_come_in_pieces(
    nats_server: NatsServer, subject_prefix: str, tmp_path: Path
) -> None:
    prompt = [1 + i % 60 for i in range(150_000)]
    async with stack(nats_server, subject_prefix, tmp_path) as (made, gateway):
        await made.worker("prefill", chunk=100_000)
        await made.worker("decode")
        prefill, decode = await pair(gateway)
        spec = gateway.spec(prompt, sampling(3))
        first, *rest = split_token_ids(spec.token_ids)
        assert len(rest) == 2
        generation = gateway.open[spec.request_id] = Generation(spec)
        subject = gateway.subjects.instance("prefill", prefill.instance, "chunk")
        await gateway.client.call(
            gateway.subjects.instance("prefill", prefill.instance, "generate"),
            PrefillRequest(
                spec=dataclasses.replace(spec, token_ids=first),
                decode_instance=decode.instance,
                decode_epoch=decode.epoch,
                num_chunks=3,
            ),
            PrefillAccepted,
            timeout_s=5,
        )
        for index, piece in enumerate(rest, start=1):
            chunk = TokenChunk(request_id=spec.request_id, attempt=1, index=index, token_ids=piece)
            await gateway.client.publish(subject, chunk)
        # The fake engine's KV check is quadratic, so only reservation and pieces are looked at.
        await until(lambda: bool(made.engines[decode.instance].sequences))
        (sequence,) = made.engines[decode.instance].sequences.values()
        assert sequence.tokens == prompt
        assert await gateway.cancel("prefill", prefill.instance, spec)
        assert await gateway.cancel("decode", decode.instance, spec)
        assert made.engines[decode.instance].sequences == {}
        assert made.engines[prefill.instance].sequences == {}
        assert not generation.is_over


async def test_cancel_frees_both_sides_and_fences(
    nats_server: NatsServer, subject_prefix: str, tmp_path: Path
) -> None:
    async with stack(nats_server, subject_prefix, tmp_path) as (made, gateway):
        await made.start(CacheService)
        await made.worker("prefill")
        await made.worker("decode")
        prefill, decode = await pair(gateway)
        spec = gateway.spec(PROMPT, sampling(900))
        generation = await gateway.place(spec, prefill, decode)
        await generation.wait_tokens(5)
        await gateway.cancel("prefill", prefill.instance, spec)
        assert await gateway.cancel("decode", decode.instance, spec)
        assert made.engines[decode.instance].sequences == {}
        assert not await gateway.cancel("decode", decode.instance, spec)
        with pytest.raises(Cancelled):
            await gateway.place(spec, prefill, decode)
        again = dataclasses.replace(spec, attempt=2, sampling=sampling(5))
        assert len((await (await gateway.place(again, prefill, decode)).wait()).tokens) == 5


async def test_a_newer_attempt_replaces_the_older(
    nats_server: NatsServer, subject_prefix: str, tmp_path: Path
) -> None:
    async with stack(nats_server, subject_prefix, tmp_path) as (made, gateway):
        await made.worker("prefill")
        await made.worker("decode")
        prefill, decode = await pair(gateway)
        spec = gateway.spec(PROMPT, sampling(900))
        first = await gateway.place(spec, prefill, decode)
        await first.wait_tokens(3)
        newer = dataclasses.replace(spec, attempt=2, sampling=sampling(10))
        second = await (await gateway.place(newer, prefill, decode)).wait()
        assert second.tokens == expected(PROMPT, 1, 10)
        with pytest.raises(ServingError):
            await gateway.place(spec, prefill, decode)


async def test_bad_tickets_are_recomputed(
    nats_server: NatsServer, subject_prefix: str, tmp_path: Path
) -> None:
    """A hand-over whose second message has a wrong checksum, played by hand."""
    async with stack(nats_server, subject_prefix, tmp_path) as (made, gateway):
        worker = await made.worker("decode")
        other = await made.worker("prefill")
        decode = await gateway.instance_of("decode")
        spec = gateway.spec(PROMPT, sampling(10))
        generation = gateway.open[spec.request_id] = Generation(spec)
        reserve = ReserveRequest(spec=spec, prefill_instance="prefill-x", prefill_epoch=1)
        await gateway.client.call(
            gateway.subjects.instance("decode", decode.instance, "reserve"),
            reserve,
            ReserveReply,
            timeout_s=5,
        )
        tickets = []
        for block in range(9):
            data = b"".join(
                kv_of(PROMPT, p) for p in range(block * BLOCK_SIZE, (block + 1) * BLOCK_SIZE)
            )
            ticket = await other.nats_lane.put(data)
            if block == 5:
                ticket = dataclasses.replace(ticket, checksum=bytes(16))
            tickets.append(ticket)
        replies = [
            await gateway.client.call(
                gateway.subjects.instance("decode", decode.instance, "handoff"),
                HandoffRequest(
                    request_id=spec.request_id,
                    attempt=1,
                    first_block=at,
                    tickets=tuple(tickets[at : at + 3]),
                    num_tokens=(at + 3) * BLOCK_SIZE,
                    is_last=at == 6,
                ),
                HandoffReply,
                timeout_s=5,
            )
            for at in (0, 3, 6)
        ]
        assert [reply.missing for reply in replies] == [(), (5,), ()]
        await generation.wait()
        assert generation.tokens == expected(PROMPT, 1, 10)
        engine = made.engines[worker.instance]
        assert engine.num_recomputed == len(PROMPT) - 1 - 5 * BLOCK_SIZE


async def test_masks_and_drafts_are_asked_for(
    nats_server: NatsServer, subject_prefix: str, tmp_path: Path
) -> None:
    """A sampler that is away, forgets, then answers; a drafter that knows the text."""
    num_rows: list[int] = []

    class Sampler(Service):
        name: ClassVar[str] = "sampler"

        async def start(self) -> None:
            self.seen = False
            await self.add_endpoint("mask", MaskRequest, self.mask, scope="any")

        async def mask(self, call: Call[MaskRequest]) -> MaskReply:
            num_rows.append(len(call.message.rows))
            if not self.seen:
                self.seen = True
                row = call.message.rows[0]
                mask = Mask(
                    request_id=row.request_id, choice=row.choice, position=0, need_grammar=True
                )
                return MaskReply(masks=(mask,))
            return MaskReply(
                masks=tuple(
                    Mask(
                        request_id=row.request_id,
                        choice=row.choice,
                        position=row.position + len(row.token_ids) // 4,
                        bitmask=b"\x0e" + bytes(7),
                    )
                    for row in call.message.rows
                )
            )

    class Drafter(Service):
        name: ClassVar[str] = "drafter"

        async def start(self) -> None:
            self.known: dict[str, list[int]] = {}
            await self.add_endpoint("draft", DraftRequest, self.draft, scope="any")

        async def draft(self, call: Call[DraftRequest]) -> DraftReply:
            drafts = []
            for row in call.message.rows:
                tokens = self.known.setdefault(row.request_id, [])
                tokens[row.position :] = np.frombuffer(row.token_ids, "<i4").tolist()
                guess = expected(tokens, 1, row.num_draft_tokens)
                drafts.append(
                    Draft(
                        request_id=row.request_id,
                        choice=row.choice,
                        position=len(tokens),
                        token_ids=np.array(guess, "<i4").tobytes(),
                    )
                )
            return DraftReply(drafts=tuple(drafts))

    async with stack(nats_server, subject_prefix, tmp_path, drafting=True) as (made, gateway):
        await made.worker("prefill", "decode", step_s=0.01)
        grammar = GrammarSpec(kind="regex", text="x", grammar_id="g")
        prefill, decode = await pair(gateway)
        bound = [
            await gateway.place(
                gateway.spec(PROMPT, sampling(12), grammar=grammar), prefill, decode
            )
            for _ in range(2)
        ]
        free = await gateway.place(gateway.spec(PROMPT, sampling(40)), prefill, decode)
        await free.wait()  # nobody drafts: as good as without
        assert free.end.num_draft_tokens == 0 and not bound[0].is_over
        await made.start(Sampler)
        await asyncio.gather(*(generation.wait() for generation in bound))
        assert set(bound[0].tokens) <= {1, 2, 3} and bound[0].tokens == bound[1].tokens
        assert max(num_rows) == 2, "one message for both"
        await made.start(Drafter)
        drafted = await gateway.generate(PROMPT, sampling(60))
        assert drafted.tokens == expected(PROMPT, 1, 60)
        assert drafted.end.num_accepted_tokens >= 20


async def test_finish_resume_credit_and_heartbeats(
    nats_server: NatsServer, subject_prefix: str, tmp_path: Path
) -> None:
    async with stack(nats_server, subject_prefix, tmp_path) as (made, gateway):
        await made.worker("prefill")
        await made.worker("decode")
        prefill, decode = await pair(gateway)
        spec = gateway.spec(PROMPT, sampling(900), credit_tokens=10)
        generation = await gateway.place(spec, prefill, decode)
        await generation.wait_tokens(10)
        before = gateway.num_heartbeats
        await until(lambda: gateway.num_heartbeats - before >= 2)
        assert len(generation.tokens) == 10

        async def resume(offset: int) -> ResumeReply:
            return await gateway.client.call(
                gateway.subjects.instance("decode", decode.instance, "resume"),
                ResumeRequest(request_id=spec.request_id, choice=0, attempt=1, offset=offset),
                ResumeReply,
                timeout_s=5,
            )

        row = (await resume(4)).row
        assert row is not None and row.offset == 4
        assert np.frombuffer(row.token_ids, "<i4").tolist() == expected(PROMPT, 1, 10)[4:]
        reply = await gateway.finish(decode.instance, spec, 7)
        assert reply.found and reply.num_steps == 10
        assert made.engines[decode.instance].sequences == {}
        assert (await resume(0)).row is not None
        ended = EndAck(ended=((spec.request_id, 0, 1),))
        subject = gateway.subjects.instance("decode", decode.instance, "ended")
        await gateway.client.publish(subject, ended)
        await until(lambda: not made.engines[decode.instance].ended)
        assert (await resume(0)).row is None
