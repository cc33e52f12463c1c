"""Every fault of a request, provoked over gRPC at the orchestrator, which serves as before afterwards."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from draft_service.drafters.language_model import LanguageModelDrafter
from orchestrator.api.bounds import MAX_REQUEST_BYTES
from specdec.core.errors import ContextExceeded, InvalidArgument, TooLarge
from target_service.language_model import LmVerifier
from testing.bad_input import attack
from testing.patience import PATIENCE_S
from testing.raw import BLOCK, TOKEN
from tests.cluster import Cluster, cluster
from tests.contract.bad import CONTEXT, INF, NAN, runner
from tests.contract.refusal import IDS, generate_request, refusal


@asynccontextmanager
async def deployment(tokenizer: str = "", **settings: Any) -> AsyncIterator[Cluster]:
    drafter = LanguageModelDrafter(runner(blend=(2, 0.3)))
    async with cluster([LmVerifier(runner())], [drafter], tokenizer=tokenizer, **settings) as running:
        expected = await running.client.generate(token_ids=IDS, max_tokens=20, seed=1)
        yield running
        # It serves as before.
        again = await running.client.generate(token_ids=IDS, max_tokens=20, seed=1)
        assert again[0].token_ids == expected[0].token_ids
        await running.settled(PATIENCE_S)


@pytest.fixture
def tokenizer_file(tmp_path: Path) -> str:
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(8)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(tmp_path / "tokenizer.json"))
    return str(tmp_path / "tokenizer.json")


BAD_VALUES: list[tuple[str, dict[str, Any]]] = [
    ("temperature", dict(temperature=-0.5)),
    ("temperature", dict(temperature=NAN)),
    ("temperature", dict(temperature=INF)),
    ("temperature", dict(temperature=1e-9)),
    ("temperature", dict(temperature=1e9)),
    ("top_p", dict(top_p=0.0)),
    ("top_p", dict(top_p=1.01)),
    ("top_p", dict(top_p=NAN)),
    ("min_p", dict(min_p=-0.1)),
    ("min_p", dict(min_p=1.5)),
    ("min_p", dict(min_p=NAN)),
    ("n", dict(n=0)),
    ("n", dict(n=65)),
    ("n", dict(n=2**32 - 1)),
    ("max_tokens", dict(max_tokens=0)),
    ("prompt", dict(token_ids=None)),
    ("token_ids", dict(token_ids={"token_ids": []})),
    ("token_ids", dict(token_ids={"token_ids": [1, 8]})),
    ("token_ids", dict(token_ids={"token_ids": [2**32 - 1]})),
    ("text", dict(text="w1")),  # no tokenizer here
    ("stop", dict(stop=["w1"])),
    ("stop_token_ids", dict(stop_token_ids=[8])),
    ("stop_token_ids", dict(stop_token_ids=[1] * 257)),
    ("verification", dict(verification=99)),
    ("num_draft_tokens", dict(num_draft_tokens=65)),
    ("chat", dict(chat={"messages": [{"role": "user", "content": "hello"}]})),
    ("chat", dict(chat={})),
    ("presence_penalty", dict(presence_penalty=NAN)),
    ("presence_penalty", dict(presence_penalty=2.1)),
    ("frequency_penalty", dict(frequency_penalty=-INF)),
    ("repetition_penalty", dict(repetition_penalty=0.0)),
    ("logit_bias", dict(logit_bias={8: 1.0})),
    ("logit_bias[3]", dict(logit_bias={3: 1000.0})),
    ("min_tokens", dict(min_tokens=3, max_tokens=2)),
    ("logprobs", dict(logprobs=21)),
    ("prompt_logprobs", dict(prompt_logprobs=2**32 - 1)),
    ("allowed_token_ids", dict(allowed_token_ids=[8])),
    ("allowed_token_ids", dict(allowed_token_ids=[1] * 4097)),
    ("min_tokens", dict(allowed_token_ids=[3], stop_token_ids=[3], min_tokens=2)),
    ("bad_words", dict(bad_words=["w1"])),  # no tokenizer here
    ("prediction", dict(prediction="w1")),
    ("truncate_prompt_tokens", dict(truncate_prompt_tokens=0)),
    ("add_special_tokens", dict(add_special_tokens=True)),
    ("grammar", dict(grammar="root ::= x")),
    ("seed", dict(resume={0: {"token_ids": [1]}})),
    ("resume[3]", dict(resume={3: {"token_ids": [1]}}, seed=1)),
    ("resume[0]", dict(resume={0: {"token_ids": [99]}}, seed=1)),
    ("resume[0]", dict(resume={0: {"token_ids": [1, 1, 1]}}, seed=1, max_tokens=2)),
]


async def test_a_bad_value_is_refused_by_the_name_of_its_field() -> None:
    async with deployment() as running:
        for field, values in BAD_VALUES:
            error = await refusal(running, generate_request(**values))
            assert isinstance(error, InvalidArgument), (values, error)
            assert [name for name, _ in error.violations] == [field], values


async def test_bad_texts_are_refused_by_name(tokenizer_file: str) -> None:
    async with deployment(tokenizer_file) as running:
        for field, values in [
            ("text", dict(text="")),
            ("text", dict(text="   ")),  # has no tokens
            ("stop[1]", dict(text="w1", stop=["a", ""])),
            ("stop[0]", dict(text="w1", stop=["a" * 257])),
            ("stop", dict(text="w1", stop=["a"] * 17)),
            ("bad_words", dict(text="w1", bad_words=["w1"] * 129)),
            ("bad_words[1]", dict(text="w1", bad_words=["w1", ""])),
            ("bad_words", dict(text="w1", bad_words=[" "])),  # has no tokens
            ("prediction", dict(text="w1", prediction="a" * (1 << 20) + "a")),
            ("prediction", dict(text="w1", prediction="w1", num_draft_tokens=1)),
            ("prediction", dict(text="w1", prediction="w1", verification=TOKEN)),
            ("chat", dict(chat={"messages": [{"role": "user", "content": "hello"}]})),  # no template here
        ]:
            error = await refusal(running, generate_request(**values))
            assert isinstance(error, InvalidArgument), (values, error)
            assert [name for name, _ in error.violations] == [field], values


async def test_every_problem_of_a_request_is_named_at_once() -> None:
    async with deployment() as running:
        error = await refusal(running, generate_request(n=0, top_p=7, grammar="x", verification=9, logprobs=22))
        assert isinstance(error, InvalidArgument)
        assert {name for name, _ in error.violations} == {"n", "top_p", "grammar", "verification", "logprobs"}


@pytest.mark.parametrize("inside", [False, True])
async def test_an_unknown_field_is_refused_by_its_number(inside: bool) -> None:
    unknown = b"\xd2\x3e\x03abc"  # field 1002, length-delimited
    message = generate_request()
    if inside:
        ids = common_ids = message.token_ids.SerializeToString() + unknown
        message.ClearField("prompt")
        data = message.SerializeToString() + b"\x12" + bytes([len(common_ids)]) + ids
    else:
        data = message.SerializeToString() + unknown
    async with deployment() as running:
        error = await refusal(running, data)
        assert isinstance(error, InvalidArgument)
        assert "1002" in str(error)


async def test_bytes_that_are_no_message_are_the_callers_fault() -> None:
    async with deployment() as running:
        for data in (b"\xff\xff\xff", b"\x0a\x05ab", b"\x0a\x02\xff\xfe", bytes(range(1, 200))):
            error = await refusal(running, data)
            assert isinstance(error, InvalidArgument), (data, error)


@pytest.mark.parametrize("values", [dict(max_tokens=CONTEXT - 2), dict(max_tokens=2**32 - 1), dict(token_ids=None)])
async def test_more_than_the_context_is_out_of_range_with_the_limit(values: dict[str, Any]) -> None:
    if "token_ids" in values:
        values = dict(token_ids={"token_ids": [1] * CONTEXT}, max_tokens=None)
    async with deployment() as running:
        error = await refusal(running, generate_request(**values))
        assert isinstance(error, ContextExceeded)
        assert str(CONTEXT) in str(error)


async def test_the_last_token_of_the_context_can_be_had() -> None:
    async with deployment() as running:
        for fields in (dict(max_tokens=CONTEXT - 3), dict(), dict(verification=BLOCK)):
            [sample] = await running.client.generate(token_ids=IDS, seed=3, **fields)
            assert len(sample.token_ids) == CONTEXT - 3
        [sample] = await running.client.generate(token_ids={"token_ids": [1] * (CONTEXT - 1)})
        assert len(sample.token_ids) == 1


async def test_no_request_breaks_the_orchestrator(tokenizer_file: str) -> None:
    async with deployment(tokenizer_file) as running:
        statuses = await attack("orchestrator", f"127.0.0.1:{running.orchestrator.port}", 400, random.Random(7))
    assert statuses["OK"] > 10, "the requests are not all nonsense"
    assert statuses["INVALID_ARGUMENT"] > 100
    assert statuses.keys() <= {"OK", "INVALID_ARGUMENT", "OUT_OF_RANGE"}


async def test_extremes_that_are_allowed_are_served() -> None:
    extremes: Sequence[dict[str, Any]] = [
        dict(seed=2**64 - 1),
        dict(seed=0, temperature=100.0),
        dict(temperature=0.001, top_k=2**32 - 1),
        dict(top_k=1, top_p=1e-300, min_p=1.0),
        dict(top_p=5e-324),
        dict(num_draft_tokens=64),
        dict(n=64, max_tokens=2),
        dict(temperature=0.0, verification=TOKEN),
        dict(temperature=0.001, verification=BLOCK),
        dict(temperature=100.0, verification=TOKEN, top_k=2),
        dict(repetition_penalty=0.01, presence_penalty=2.0, frequency_penalty=-2.0),
        dict(repetition_penalty=10.0, presence_penalty=-2.0, frequency_penalty=2.0, verification=BLOCK),
        dict(logit_bias=dict.fromkeys(range(8), -100.0), temperature=0.0),
        dict(logit_bias={0: 100.0, 1: -100.0}, min_tokens=12, stop_token_ids=[0, 1, 2, 3, 4, 5, 6], verification=TOKEN),
    ]
    async with deployment() as running:
        for extreme in extremes:
            fields = {"max_tokens": 12, **extreme}
            samples = await running.client.generate(PATIENCE_S, token_ids=IDS, **fields)
            assert all(len(sample.token_ids) == fields["max_tokens"] for sample in samples), extreme


async def test_a_request_with_everything_wrong_is_refused_in_a_status_that_gets_through() -> None:
    """A status travels in metadata, of which gRPC takes a few KiB: it names so many violations and counts the rest."""
    async with deployment() as running:
        wrong = generate_request(
            logit_bias=dict.fromkeys(range(1000, 1300), 1e9),
            stop=["x" * 1000] * 16,
            temperature=-1.0,
            top_p=7.0,
            seed=1,
        )
        for index in range(64):
            wrong.resume[2**32 - 1 - index].token_ids[:] = [2**32 - 1]
        error = await refusal(running, wrong)
        assert isinstance(error, InvalidArgument), error
        assert len(error.violations) == 33
        assert error.violations[-1][1].startswith("and ")


async def test_a_message_of_the_greatest_size_disturbs_no_other() -> None:
    async with deployment() as running:
        for long in (
            dict(stop_token_ids=[1] * (MAX_REQUEST_BYTES // 2)),
            dict(token_ids={"token_ids": [1] * (MAX_REQUEST_BYTES // 2)}),
            dict(stop=[""] * (MAX_REQUEST_BYTES // 4)),
        ):
            request = generate_request(**long)
            assert request.ByteSize() < MAX_REQUEST_BYTES
            assert isinstance(await refusal(running, request), InvalidArgument | ContextExceeded)
        too_long = b"\x00" * (MAX_REQUEST_BYTES + 1)
        assert isinstance(await refusal(running, too_long), TooLarge), "gRPC's own status"
