from draft_service.drafters.language_model import LanguageModelDrafter
from target_service.lm_verifier import LmVerifier
from tests.cluster import cluster
from tests.table_model import TableRunner


async def test_speculation_keeps_the_text_of_a_table_model() -> None:
    verifier = LmVerifier(TableRunner(seed=1))
    drafter = LanguageModelDrafter(TableRunner(seed=1, blend=(2, 0.3)))
    async with cluster([verifier], [drafter]) as deployment:
        request = dict(token_ids={"token_ids": [1, 2, 3]}, max_tokens=40, seed=7)
        [alone] = await deployment.client.generate(num_draft_tokens=0, **request)
        [drafted] = await deployment.client.generate(num_draft_tokens=4, **request)
        assert drafted.token_ids == alone.token_ids
        assert drafted.finish.speculation.num_accepted_tokens > 0
        assert len(alone.token_ids) == 40
        await deployment.settled()
