"""What a diagnosis says, for a terminal of 80 columns and as JSON. Knows visits and findings; asks nobody."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

from specdec.cli.doctor import Finding, Visit

_COLUMNS = 80
_PREFIX, _SHORT_PREFIX = 12, 8  # characters shown of a model digest, and of a vocabulary's fingerprint


def lines(visits: Sequence[Visit], findings: Sequence[Finding]) -> Iterator[str]:
    """A paragraph for each service and each finding. A line has at most 80 columns, or a single longer word."""
    for each in visits:
        state = "no answer" if each.silence else "serving" if each.serving else "not serving"
        yield from _wrapped(f"{each}: {state}", "    ")
        for facts in () if each.silence else (_model(each), _load(each)):
            yield from _wrapped("  " + ", ".join(facts), "    ") if facts else ()
    for finding in findings:
        yield from _wrapped(f"{'WRONG' if finding.wrong else 'NOTE'}: {finding.what}.", "  ")
        yield from _wrapped(f"  To do: {finding.remedy}.", "  ")
    if not findings:
        yield "All is well."


def _wrapped(text: str, indent: str) -> list[str]:
    # Addresses and paths stay whole, so that they can be copied.
    return textwrap.wrap(text, _COLUMNS, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def _model(each: Visit) -> list[str]:
    if (info := each.info) is None:
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


def _load(each: Visit) -> list[str]:
    facts = [f"round trip {each.round_trip_ms:.1f} ms", f"live {each.load.live_sequences}"]
    if each.load.kv_slots_total:
        facts.append(f"KV {each.load.kv_slots_used}/{each.load.kv_slots_total}")
    return facts


def as_dict(visits: Sequence[Visit], findings: Sequence[Finding]) -> dict[str, Any]:
    """All visits and findings, for JSON."""
    return {
        "ok": not any(each.wrong for each in findings),
        "services": [
            {
                "role": each.role,
                "address": each.address,
                "silence": each.silence,
                "serving": each.serving and not each.silence,
                "round_trip_ms": None if each.silence else round(each.round_trip_ms, 3),
                "model": each.info.name if each.info else None,
                "model_digest": each.info.model_digest if each.info else None,
                "vocab_size": each.info.vocab_size if each.info else None,
                "tokenizer_fingerprint": each.info.tokenizer_fingerprint if each.info else None,
                "context_length": each.info.context_length if each.info else None,
                "dtype": each.info.dtype if each.info else None,
                "backend": each.info.backend if each.info else None,
                "max_chain": each.info.max_chain if each.info else None,
                "head": each.info.self_draft if each.info else None,
                "live_sequences": each.load.live_sequences,
                "kv_slots_used": each.load.kv_slots_used,
                "kv_slots_total": each.load.kv_slots_total,
                "keepalive_ms": each.keepalive.keepalive_ms,
                "min_ping_interval_ms": each.keepalive.min_ping_interval_ms,
            }
            for each in visits
        ],
        "findings": [{"wrong": each.wrong, "what": each.what, "remedy": each.remedy} for each in findings],
    }
