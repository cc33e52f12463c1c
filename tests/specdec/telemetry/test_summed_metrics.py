"""Metrics of several processes as one scrape: what is added up, and what of a process that has ended."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from specdec.telemetry import summed_metrics
from specdec.telemetry.summed_metrics import SummedMetrics

_TEXT = """\
# TYPE specdec_rounds_total counter
specdec_rounds_total{{kind="open"}} {0}
specdec_rounds_total{{kind="plain"}} 1
# TYPE specdec_live_sequences gauge
specdec_live_sequences {0}
# TYPE specdec_replica_ready gauge
specdec_replica_ready{{address="a"}} 1
# TYPE specdec_replica_latency_seconds gauge
specdec_replica_latency_seconds{{address="a"}} {0}
# TYPE wait_seconds histogram
wait_seconds_bucket{{le="1"}} {0}
wait_seconds_bucket{{le="+Inf"}} {0}
wait_seconds_count {0}
wait_seconds_sum {0}
"""


@pytest.fixture
def scraped(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """The number in the metrics of each address; an address that is not there does not answer."""
    numbers: dict[str, int] = {}

    def read(address: str):
        if address not in numbers:
            return None
        return {family.name: family for family in text_string_to_metric_families(_TEXT.format(numbers[address]))}

    monkeypatch.setattr(summed_metrics, "_read", read)
    return numbers


def _values(metrics: SummedMetrics) -> dict[str, float]:
    samples = [sample for family in metrics.collect() for sample in family.samples]
    return {"".join([sample.name, *sample.labels.values()]): sample.value for sample in samples}


def test_counts_are_added_up_and_of_states_and_times_the_largest_is_taken(scraped):
    metrics = SummedMetrics()
    for number, address in enumerate(("a", "b")):
        metrics.begin(number, address)
    scraped |= {"a": 2, "b": 3}
    values = _values(metrics)
    assert values["specdec_rounds_totalopen"] == values["specdec_live_sequences"] == 5
    assert values["specdec_rounds_totalplain"] == 2
    assert values["specdec_replica_readya"] == 1
    assert values["specdec_replica_latency_secondsa"] == 3
    assert values["wait_seconds_bucket1"] == values["wait_seconds_count"] == values["wait_seconds_sum"] == 5


def test_what_an_ended_process_counted_stays_and_its_gauges_go(scraped):
    metrics = SummedMetrics()
    metrics.begin(0, "a")
    scraped["a"] = 2
    assert _values(metrics)["specdec_live_sequences"] == 2
    del scraped["a"]
    for address, number in (("b", 3), ("c", 4)):
        metrics.begin(0, address)
        scraped[address] = number
        values = _values(metrics)
    assert values["specdec_rounds_totalopen"] == values["wait_seconds_count"] == 9
    assert values["specdec_live_sequences"] == 4


def test_a_process_that_does_not_answer_is_as_it_was_last(scraped):
    metrics = SummedMetrics()
    metrics.begin(0, "a")
    assert _values(metrics) == {}
    scraped["a"] = 2
    _values(metrics)
    del scraped["a"]
    assert _values(metrics)["specdec_rounds_totalopen"] == 2
