"""What the tools that measure a server share: 30 s of chat and of completions, and the times to the first token.

Both are measured at the same time, so that a busy machine slows both."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SECONDS = 30
REQUESTS_PER_S = 1
PROMPT_TOKENS = 256
OUTPUT_TOKENS = 32
TOKENIZER = str(Path(__file__).resolve().parents[2] / "models" / "demo" / "target")
TOLERANCE = 0.2


def equal_first_tokens(median_ttft_ms: Callable[[str], float]) -> str:
    """``median_ttft_ms`` measures "chat" or "completions", in milliseconds. Returns both times in words."""
    with ThreadPoolExecutor() as threads:
        chat, completions = threads.map(median_ttft_ms, ("chat", "completions"))
    figures = f"TTFT of chat {chat:.0f} ms, of completions {completions:.0f} ms"
    assert abs(chat / completions - 1) <= TOLERANCE, figures
    return figures


def run(command: Sequence[str]) -> None:
    process = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert process.returncode == 0, (process.stdout + process.stderr)[-1500:]
