"""What chaos sends to orchestrators to be compiled."""

from __future__ import annotations

import json
import random

import pytest

from bench.chaos.hostile_grammars import FORMS


@pytest.mark.parametrize("form", FORMS)
def test_a_seed_gives_one_text_and_seeds_give_many(form):
    texts = [json.dumps(FORMS[form](random.Random(seed))) for seed in range(200)]
    assert texts == [json.dumps(FORMS[form](random.Random(seed))) for seed in range(200)]
    assert len(set(texts)) > 20


def test_known_crashes_of_compilers_are_drawn():
    schemas = [FORMS["json_schema"](random.Random(seed)) for seed in range(1000)]
    assert any(f'"const": {-(2**63)}' in each for each in schemas)
    assert any('"multipleOf": 1000003' in each for each in schemas)
    assert any(each.count('"pattern"') >= 16 and "allOf" in each for each in schemas)
    larks = [FORMS["grammar"](random.Random(seed)) for seed in range(1000)]
    assert any(each.count("\n") >= 3000 for each in larks), "a chain of rules deeper than a stack"
