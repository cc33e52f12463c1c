"""``python -m testing.table_service target|draft --port P ...``: serves a table model with the real service."""

from __future__ import annotations

import sys

from pydantic import Field

from draft_service.server import create_server as create_draft_server
from specdec.core.settings import EngineSettings, parse
from specdec.planner.pass_time import PassTime
from specdec.server.model_server import run
from specdec.speculation.acceptance import PRIOR
from target_service.server import create_server as create_target_server
from testing.table_model import Device, Poison, Table, TableDrafter, TableVerifier


class TableSettings(EngineSettings):
    """Serve a table model."""

    pass_ms: float = Field(0.0, ge=0, description="milliseconds per pass, or per draft step")
    row_us: float = Field(0.0, ge=0, description="microseconds per row of a target pass")
    curve: str = Field("", description="instead: a pass or step by its rows (see specdec plan --target-pass)")
    device: str = Field("", description="a file: services with the same one never work at the same time")
    acceptance: float = Field(0.8, ge=0, le=1, description="how often the draft's first candidate is right")
    runner_up: float = Field(PRIOR[1], ge=0, le=1, description="how often its second one is right if not the first")
    period: int = Field(0, ge=0, description="tokens after which the text repeats; 0: never")
    self_drafts: bool = Field(False, description="the target drafts self-drafts, chains of the first candidates")
    chunk_rows: int = Field(512, gt=0, description="rows of a prefill per pass")
    vocab_size: int = Field(1024, gt=1)
    kv_slots: int = Field(1 << 20, gt=0)
    cached_blocks: int = Field(0, ge=0, description="blocks of 16 ids of former texts that an open finds again")
    fail_on_token: int | None = Field(None, description="raise in every pass of a text with this token")
    crash_on_token: int | None = Field(None, description="end the process in a pass of a text with this token")
    hang_on_token: int | None = Field(None, description="never end a pass of a text with this token")


def main() -> None:
    role = sys.argv[1] if len(sys.argv) > 1 else ""
    settings = parse(TableSettings, sys.argv[2:], f"testing.table_service {role}")
    table = Table(settings.vocab_size, settings.acceptance, period=settings.period, runner_up=settings.runner_up)
    line = PassTime.parse(settings.curve).seconds if settings.curve else None
    if role == "target":
        target_s = line or (lambda rows: settings.pass_ms / 1e3 + settings.row_us / 1e6 * rows)
        tokens = (settings.fail_on_token, settings.crash_on_token, settings.hang_on_token)
        verifier = TableVerifier(
            table,
            settings.kv_slots,
            chunk_rows=settings.chunk_rows,
            poison=Poison(*tokens) if any(token is not None for token in tokens) else None,
            self_drafts=settings.self_drafts,
            device=Device(target_s, settings.device),
            cached_blocks=settings.cached_blocks,
        )
        run(settings, "target", lambda: lambda: create_target_server(verifier, settings))
    elif role == "draft":
        drafter = TableDrafter(table, device=Device(line or (lambda rows: settings.pass_ms / 1e3), settings.device))
        run(settings, "draft", lambda: lambda: create_draft_server(drafter, settings))
    else:
        raise SystemExit("testing.table_service: the first argument must be target or draft")


if __name__ == "__main__":
    main()
