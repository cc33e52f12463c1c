"""Fixtures of all tests below."""

from __future__ import annotations

import pytest

from draft_service.drafters.other_vocabulary.translation import ByteVocabulary, Translation
from tests.draft_service.vocabularies import between, bundled, known, other_tokenizer
from tests.one_thread import one_thread  # noqa: F401


@pytest.fixture(scope="module")
def target() -> ByteVocabulary:
    return known(bundled)


@pytest.fixture(scope="module")
def translation() -> Translation:
    return between(other_tokenizer)
