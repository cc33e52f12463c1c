"""A model's tokenizer.json from a hub, or from what is kept of it on this machine (HF_HOME).

Knows the hub's client; refuses to know what a tokenizer is.
"""

from __future__ import annotations

from pathlib import Path

_NOT_TO_BE_HAD = (
    "--tokenizer: {name} is neither a tokenizer.json, nor a directory with one, nor can a hub give it: {why}"
)


def tokenizer_file(name: str) -> Path:
    """``name`` is a hub id, such as a target's. Raises ValueError, in words, if it cannot be had."""
    # Imported here: who names a file does not need it.
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(hf_hub_download(name, "tokenizer.json"))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise ValueError(_NOT_TO_BE_HAD.format(name=name, why=error)) from error
