"""What a diagnosis says, for a terminal of 80 columns and as JSON."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

from specdec.cli.doctor import Finding, Visit

_COLUMNS = 80
_PREFIX, _SHORT_PREFIX = 12, 8  # characters shown of a model digest, and of a vocabulary's fingerprint


def lines(visits: Sequence[Visit], findings: Sequence[Finding]) -> Iterator[str]:
    """A paragraph for each service and each finding. A line has at most 80 columns, or a single longer word."""
    for visit in visits:
        state = "no answer" if visit.silence else "serving" if visit.serving else "not serving"
        yield from _wrapped(f"{visit}: {state}", "    ")
        for facts in () if visit.silence else (_model(visit), _load(visit)):
            yield from _wrapped("  " + ", ".join(facts), "    ") if facts else ()
    for finding in findings:
        yield from _wrapped(f"{'WRONG' if finding.wrong else 'NOTE'}: {finding.what}.", "  ")
        yield from _wrapped(f"  To do: {finding.remedy}.", "  ")
    if not findings:
        yield "All is well."


def _wrapped(text: str, indent: str) -> list[str]:
    # Addresses and paths stay whole, so that they can be copied.
    return textwrap.wrap(text, _COLUMNS, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def _model(visit: Visit) -> list[str]:
    if (info := visit.info) is None:
        return []
    return [
        f"model {info.name}",
        f"digest {info.model_digest[:_PREFIX]}",
        f"vocabulary {info.vocab_size} {info.tokenizer_fingerprint[:_SHORT_PREFIX]}".strip(),
        f"context {info.context_length}",
        *filter(None, (info.dtype, info.backend)),
        *([f"chains of {info.max_chain}"] if info.max_chain else []),
        *([f"head {info.self_draft}"] if info.self_draft else []),
    ]


def _load(visit: Visit) -> list[str]:
    facts = [f"round trip {visit.round_trip_ms:.1f} ms", f"live {visit.load.live_sequences}"]
    if visit.load.kv_slots_total:
        facts.append(f"KV {visit.load.kv_slots_used}/{visit.load.kv_slots_total}")
    return facts


def as_dict(visits: Sequence[Visit], findings: Sequence[Finding]) -> dict[str, Any]:
    """All visits and findings, for JSON."""
    return {
        "ok": not any(finding.wrong for finding in findings),
        "services": [
            {
                "role": visit.role,
                "address": visit.address,
                "silence": visit.silence,
                "serving": visit.serving and not visit.silence,
                "round_trip_ms": None if visit.silence else round(visit.round_trip_ms, 3),
                "model": visit.info.name if visit.info else None,
                "model_digest": visit.info.model_digest if visit.info else None,
                "vocab_size": visit.info.vocab_size if visit.info else None,
                "tokenizer_fingerprint": visit.info.tokenizer_fingerprint if visit.info else None,
                "context_length": visit.info.context_length if visit.info else None,
                "dtype": visit.info.dtype if visit.info else None,
                "backend": visit.info.backend if visit.info else None,
                "max_chain": visit.info.max_chain if visit.info else None,
                "head": visit.info.self_draft if visit.info else None,
                "live_sequences": visit.load.live_sequences,
                "kv_slots_used": visit.load.kv_slots_used,
                "kv_slots_total": visit.load.kv_slots_total,
                "keepalive_ms": visit.keepalive.keepalive_ms,
                "min_ping_interval_ms": visit.keepalive.min_ping_interval_ms,
            }
            for visit in visits
        ],
        "findings": [{"wrong": finding.wrong, "what": finding.what, "remedy": finding.remedy} for finding in findings],
    }
