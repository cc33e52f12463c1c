"""The dashboard's rows of panels, each with a question as its title.

Knows panels and their queries; does not know where they are drawn. Metric names are those of a scrape of the services.
"""

from __future__ import annotations

from dataclasses import dataclass

RATE = "$__rate_interval"

TOKENS = f'sum(rate(specdec_round_tokens_total{{kind!="open"}}[{RATE}]))'
SPEED = f'{TOKENS} / sum(rate(specdec_round_duration_seconds_total{{kind!="open"}}[{RATE}]))'
ALONE = (
    'sum(rate(specdec_round_tokens_total{kind="plain"}[10m]))'
    ' / (sum(rate(specdec_round_duration_seconds_total{kind="plain"}[10m]))'
    ' - sum(rate(specdec_round_draft_wait_seconds_total{kind="plain"}[10m])))'
)
"""Measured speed of rounds without draft tokens, excluding their waits for drafts that did not arrive."""
PARTS = f'sum by (part) (rate(specdec_round_time_seconds_total{{part!="open"}}[{RATE}]))'
DRAFTS = f"sum(rate(vllm:spec_decode_num_drafts_total[{RATE}]))"
FIRST_POSITIONS = 'vllm:spec_decode_num_accepted_tokens_per_pos_total{position=~"[0-7]"}'
ACCEPTED = f"sum(rate(vllm:spec_decode_num_accepted_tokens_total[{RATE}]))"
ROUNDS = f'sum(rate(specdec_rounds_total{{kind!="open"}}[{RATE}]))'


@dataclass(frozen=True)
class Query:
    expression: str
    legend: str


@dataclass(frozen=True)
class Panel:
    """A panel. ``kind`` is a panel type of Grafana, ``unit`` one of its units, ``why`` the description."""

    title: str
    why: str
    queries: tuple[Query, ...]
    unit: str = "none"
    kind: str = "timeseries"
    stacked: bool = False
    width: int = 8


def rate(counter: str, by: str = "") -> str:
    return f"sum{f' by ({by}) ' if by else ' '}(rate({counter}[{RATE}]))"


def ratio(counter: str, other: str, by: str = "") -> str:
    return f"{rate(counter, by)} / {rate(other, by)}"


def per_pass(counter: str) -> str:
    return f"rate({counter}[{RATE}]) / rate(specdec_passes_total[{RATE}])"


def quantile(share: float, histogram: str, by: str = "") -> str:
    return f"histogram_quantile({share}, sum by (le{f', {by}' if by else ''}) (rate({histogram}_bucket[{RATE}])))"


ROWS: dict[str, tuple[Panel, ...]] = {
    "Is speculation paying right now?": (
        Panel(
            "Is speculation paying right now? Times the target alone",
            "Tokens per second of a sequence, divided by those of rounds without draft tokens in the last ten minutes. "
            "The controller makes some of these rounds to measure them. Above 1 speculation pays. No data if the "
            "number of draft tokens is fixed.",
            (Query(f"({SPEED}) / ({ALONE})", "times"),),
            kind="stat",
            width=6,
        ),
        Panel(
            "Mean accepted length",
            "1 + accepted / drafts: tokens per round with draft tokens.",
            (Query(f"1 + {ACCEPTED} / {DRAFTS}", "tokens"),),
            width=6,
        ),
        Panel(
            "Acceptance by depth",
            "Share of the rounds with draft tokens in which the token at this depth was accepted. Tokens deeper than 7 "
            "come from prompt lookup, or from a fixed number of more than 8 draft tokens.",
            (Query(f"{rate(FIRST_POSITIONS, 'position')} / scalar({DRAFTS})", "depth {{position}}"),),
            "percentunit",
            width=6,
        ),
        Panel(
            "Rounds",
            "Plain: the controller drafts nothing, or no draft arrived. Open: prefills, including replays.",
            (Query(rate("specdec_rounds_total", "kind"), "{{kind}}"),),
            "ops",
            stacked=True,
            width=6,
        ),
    ),
    "Where does a round's time go?": (
        Panel(
            "Where does a round's time go?",
            "Mean time of a decoding round. Work of the target for which no round waits is not included.",
            (Query(f"{PARTS} / scalar({ROUNDS})", "{{part}}"),),
            "s",
            stacked=True,
            width=6,
        ),
        Panel(
            "Time per pass",
            "Mean time of a pass. The ratio of a draft's step to a target's pass decides whether drafting pays.",
            (Query(per_pass("specdec_busy_seconds_total"), "{{service}} {{instance}}"),),
            "s",
            width=6,
        ),
        Panel(
            "CPU per round",
            "CPU time of each service's processes, all threads, per round of all orchestrators.",
            (Query(f"{rate('process_cpu_time_seconds_total', 'service')} / scalar({ROUNDS})", "{{service}}"),),
            "s",
            width=6,
        ),
        Panel(
            "Event loop lag, p99",
            "Delay of a timer of the event loop. It adds to every round.",
            (Query(quantile(0.99, "specdec_event_loop_lag_seconds", "service"), "{{service}}"),),
            "s",
            width=6,
        ),
    ),
    "Which draft is bad?": (
        Panel(
            "Which draft is bad? Acceptance by draft",
            "Share of a draft's tokens that were accepted. All low: the pair or the text; one low: that replica.",
            (
                Query(
                    ratio("specdec_draft_accepted_tokens_total", "specdec_draft_tokens_total", "address"), "{{address}}"
                ),
            ),
            "percentunit",
            width=6,
        ),
        Panel(
            "Wait for a draft, per round",
            "Mean time that a round waited for this draft.",
            (Query(ratio("specdec_draft_wait_seconds_total", "specdec_draft_rounds_total", "address"), "{{address}}"),),
            "s",
            width=6,
        ),
        Panel(
            "Late and unused",
            "Late: rounds that missed the draft deadline, as a share of the rounds with draft tokens. Unused: nodes "
            "that were never verified, as a share of all received nodes, including late ones.",
            (
                Query(ratio("specdec_draft_late_total", "specdec_draft_rounds_total", "address"), "late {{address}}"),
                Query(ratio("specdec_draft_nodes_unused_total", "specdec_draft_nodes_received_total"), "unused"),
            ),
            "percentunit",
            width=6,
        ),
        Panel(
            "Draft, lookup or self-draft? Accepted tokens",
            "Lookup: accepted tokens that prompt lookup proposed. Self-draft: those that targets drafted themselves.",
            (
                Query(
                    f"{ACCEPTED} - sum(rate(specdec_lookup_accepted_tokens_total[{RATE}]))"
                    f" - sum(rate(specdec_self_draft_accepted_tokens_total[{RATE}]))",
                    "draft",
                ),
                Query(f"sum(rate(specdec_lookup_accepted_tokens_total[{RATE}]))", "lookup"),
                Query(f"sum(rate(specdec_self_draft_accepted_tokens_total[{RATE}]))", "self-draft"),
            ),
            "ops",
            stacked=True,
            width=6,
        ),
    ),
    "Is the target saturated?": (
        Panel(
            "Is the target saturated? Share of time in passes",
            "At 100 % a further sequence slows the others down. Drafts are shown for comparison.",
            (Query(f"rate(specdec_busy_seconds_total[{RATE}])", "{{service}} {{instance}}"),),
            "percentunit",
            width=6,
        ),
        Panel(
            "Queues",
            "Sequences in a pass of a model or waiting for one, requests in the queue of an orchestrator, and "
            "sequences that retry after a full target refused them.",
            (
                Query("sum by (service) (specdec_waiting_sequences)", "active at {{service}}"),
                Query("sum(specdec_waiting_requests)", "waiting requests"),
                Query("sum(specdec_waiting_for_room)", "refused by full targets"),
                Query('sum(specdec_live_sequences{service="orchestrator"})', "live sequences"),
            ),
            width=6,
        ),
        Panel(
            "Rows per pass",
            "Mean number of rows of a pass: prompt tokens and draft tokens of all its sequences.",
            (Query(per_pass("specdec_rows_total"), "{{service}} {{instance}}"),),
            width=6,
        ),
        Panel(
            "KV cache in use",
            "Near 100 %, sequences are refused or preempted, and replayed.",
            (Query("specdec_kv_slots_used / (specdec_kv_slots_total > 0)", "{{service}} {{instance}}"),),
            "percentunit",
            width=6,
        ),
    ),
    "How far from target-only speed are we?": (
        Panel(
            "How far from target-only speed are we? Tokens per second of a sequence",
            "The current speed; the target alone, measured in rounds without draft tokens; the controller's estimate.",
            (
                Query(SPEED, "now"),
                Query(ALONE, "target alone"),
                Query("1 / avg(specdec_target_alone_round_seconds)", "estimate of the controller"),
            ),
        ),
        Panel(
            "Time per output token, and to the first",
            "Latencies seen by clients.",
            (
                Query(quantile(0.5, "gen_ai_server_time_per_output_token_seconds"), "per token p50"),
                Query(quantile(0.99, "gen_ai_server_time_per_output_token_seconds"), "per token p99"),
                Query(quantile(0.5, "gen_ai_server_time_to_first_token_seconds"), "first token p50"),
                Query(quantile(0.99, "gen_ai_server_time_to_first_token_seconds"), "first token p99"),
            ),
            "s",
        ),
        Panel(
            "Tokens per second in all, and requests by outcome",
            "Throughput of the whole deployment.",
            (
                Query(TOKENS, "tokens"),
                Query(rate("gen_ai_server_request_duration_seconds_count", "outcome"), "requests {{outcome}}"),
            ),
            "ops",
        ),
    ),
    "What went wrong, and what serves": (
        Panel(
            "Replays by reason",
            "Sequences opened again on a replica.",
            (
                Query(f"{rate('specdec_replays_total', 'reason')} > 0", "{{reason}}"),
                Query(rate("specdec_parked_total"), "parked"),
            ),
            "ops",
        ),
        Panel(
            "Replayed tokens, and replicas lost",
            "Tokens fed again, per committed token; replicas lost or ejected, by reason.",
            (
                Query(f"{rate('specdec_replayed_tokens_total')} / {TOKENS}", "replayed tokens per token"),
                Query(f"{rate('specdec_replica_losses_total', 'role, reason')} > 0", "{{role}} {{reason}}"),
            ),
        ),
        Panel(
            "Models that serve",
            "Replicas by model. Two digests of one service mean that an upgrade is in progress.",
            (Query("count by (service, model, digest) (specdec_model_info)", "{{service}} {{model}} {{digest}}"),),
            kind="bargauge",
        ),
    ),
    "What do clients of HTTP get?": (
        Panel(
            "What do clients of HTTP get? Requests by status",
            "Answers of the gateways. 429: queue or quota; 503: no target; 500 should never be seen.",
            (Query(rate("specdec_gateway_requests_total", "route, status"), "{{route}} {{status}}"),),
            "ops",
            stacked=True,
        ),
        Panel(
            "Time until an answer begins",
            "Of streams until the first event, of others until the end.",
            (
                Query(quantile(0.5, "specdec_gateway_answer_seconds", "route"), "{{route}} p50"),
                Query(quantile(0.99, "specdec_gateway_answer_seconds", "route"), "{{route}} p99"),
            ),
            "s",
        ),
        Panel(
            "Open streams",
            "Of each gateway.",
            (Query("sum by (instance) (specdec_gateway_streams)", "{{instance}}"),),
        ),
    ),
}
