"""What bench distance says of its rows, and that its deployment with a draft grown ahead says what the target says."""

from __future__ import annotations

from bench.distance import _AHEAD, _ALONE, _MODES, _SYNC, PairName, Row, TablePair, _lab, _ratios, _table

SITUATIONS = ("0 ms", "1 ms", "5 ms", "20 ms", "50 ms", "32 streams", "random", "gone")


def test_ratios_compare_with_the_best_synchronous_draft_and_find_the_worst_case():
    rate = {(each, mode.name): 10.0 for each in SITUATIONS for mode in _MODES}
    rate |= {("20 ms", _SYNC[1].name): 20.0, ("20 ms", _AHEAD.name): 30.0, ("0 ms", _AHEAD.name): 40.0}
    rate |= {("0 ms", _SYNC[2].name): 32.0, ("50 ms", _SYNC[0].name): 5.0, ("random", _AHEAD.name): 9.0}
    rows = [Row(situation, mode, tokens_per_s, 1.0, 0.5) for (situation, mode), tokens_per_s in rate.items()]
    assert _ratios(rows) == {
        "worst_over_alone": 0.9,
        "ahead_over_sync_rtt20": 1.5,
        "ahead_over_alone_rtt20": 3.0,
        "ahead_over_sync_rtt50": 1.0,
        "ahead_over_sync_rtt0": 1.25,
        "ahead_rtt20_over_rtt0": 0.75,
    }
    assert _table(rows).row_count == len(rows)


async def test_every_mode_says_the_same_whatever_happens_to_the_draft():
    async with _lab(PairName.table, TablePair(2.0, 0.2, 0.8), 20) as lab:
        request = {"token_ids": {"token_ids": [1, 2, 3]}, "max_tokens": 60, "temperature": 0.0}
        [alone] = await lab.clients["near"].generate(**request, num_draft_tokens=0)
        for name, client in lab.clients.items():
            [sample] = await client.generate(**request)
            assert sample.token_ids == alone.token_ids, name
        lab.proxy.refuse = True
        lab.proxy.reset()
        [sample] = await lab.clients["ahead"].generate(**request)
        assert sample.token_ids == alone.token_ids
        row = await lab.run(_ALONE, 2, 10, 0)
        assert row.tokens_per_s > 0
        assert row.draft_tokens_per_round == 0
