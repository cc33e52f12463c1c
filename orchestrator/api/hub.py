"""A model's tokenizer.json from a hub, or from the hub's cache on this machine (HF_HOME).

Knows the hub's client; does not know what a tokenizer is.
"""

from __future__ import annotations

from pathlib import Path

from specdec.runner.files import TOKENIZER, why_not_given


def tokenizer_file(name: str, revision: str) -> Path:
    """The tokenizer of ``name``, a hub id, at ``revision`` (empty: its main branch).

    Raises ValueError, with the reason in words, if it is not available.
    """
    # Imported here, since a tokenizer from a file does not need it.
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(name, TOKENIZER, revision=revision or None))
    except Exception as error:  # the client passes on those of several libraries
        what = f"--tokenizer: {name} is neither a {TOKENIZER}, nor a directory with one, nor can a hub give it"
        raise ValueError(f"{what}{why_not_given(error, revision)}") from error
