"""Chat templates give the text that transformers renders, for many styles of template and conversation."""

from __future__ import annotations

import json
from datetime import datetime

import pytest
from transformers import PreTrainedTokenizerFast

from orchestrator.tokenizer.chat_template import ChatTemplate, Conversation
from orchestrator.tokenizer.files import TokenizerFiles
from specdec.core.errors import InvalidArgument
from tests.checkout import DEMO

TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}

STYLES = {
    "tags": "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    "headers": "{{ bos_token }}{% for m in messages %}{{ '<|start|>' + m.role + '<|end|>\n\n' + (m.content or '')"
    " | trim + '<|eot|>' }}{% endfor %}{{ '<|start|>assistant<|end|>\n\n' if add_generation_prompt else '' }}",
    "brackets": """
{%- if messages[0].role == "system" %}
    {%- set system = messages[0].content %}
    {%- set rest = messages[1:] %}
{%- else %}
    {%- set system = "" %}
    {%- set rest = messages %}
{%- endif %}
{{- bos_token }}
{%- for m in rest %}
    {%- if m.role == "user" %}
        {{- "[INST] " + (system + "\\n\\n" if loop.first and system else "") + m.content + " [/INST]" }}
    {%- else %}
        {{- " " + (m.content or "") + eos_token }}
    {%- endif %}
{%- endfor %}""",
    "turns": """{{ bos_token }}{% set ns = namespace(seen=0) %}
{% for m in messages if m.role != 'system' %}
{% set ns.seen = ns.seen + 1 %}
<turn {{ ns.seen }} {{ 'model' if m.role == 'assistant' else m.role }}>{{ m.content }}</turn>
{% endfor %}
{% if add_generation_prompt %}<turn {{ ns.seen + 1 }} model>{% endif %}""",
    "macros": """{% macro show(m, last) %}<|{{ m.role }}|>
{{ m.content }}{{ '' if last else eos_token }}
{% endmacro %}
{% for m in messages %}{{ show(m, loop.last and not add_generation_prompt) }}{% endfor %}
{%- if add_generation_prompt -%}<|assistant|>{% endif %}""",
    "loop controls": """{% for m in messages %}
{% if m.role == 'tool' %}{% continue %}{% endif %}
{% if loop.index0 > 6 %}{% break %}{% endif %}
{{ m.role }}: {{ m.content }}
{% endfor %}""",
    "tools": """{% if tools %}<tools>
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}</tools>
{{ tools | tojson(indent=2) }}
{% endif %}{% for m in messages %}{{ m.role }}: {{ m.content if m.content is not none else 'none' }}
{% for call in m.tool_calls or [] %}<call>{{ call.function.name }} {{ call.function.arguments | tojson }}</call>
{% endfor %}{% endfor %}""",
    "generation": """{% for m in messages %}{% if m.role == 'assistant' %}
{% generation %}{{ m.content }}{{ eos_token }}{% endgeneration %}
{% else %}{{ m.role }}> {{ m.content }}{% endif %}{% endfor %}""",
    "thoughts": """{% for m in messages %}{{ m.role }}: {% if m.reasoning_content is defined and m.reasoning_content %}
<think>{{ m.reasoning_content.strip('\\n') }}</think>{% endif %}{{ (m.content or '').lstrip() }}
{% endfor %}{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}""",
    "filters": "{{ messages | map(attribute='role') | join(',') }}{{ messages | length }}"
    "{% for m in messages | reverse %}{{ m.content | default('?', true) | upper }}"
    "{{ loop.cycle('a', 'b') }}{% endfor %}",
    "strings": "{% for m in messages %}{{ (m.content or '').split(' ')[-1] ~ '|' ~ m.role[::-1] ~ '|' }}"
    "{{ loop.revindex }}{% endfor %}{{ {'b': 1, 'a': '<é&>'} | tojson }}{{ dict(x=1).items() | list }}",
    "date": "{{ strftime_now('%Y') }}{% for m in messages %}{{ m.content }}{% endfor %}",
}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"z": {"type": "<int>"}, "a": "é"}}}]
USER, ASSISTANT = {"role": "user", "content": "What is 2 + 2 ?"}, {"role": "assistant", "content": " It is 4. "}
CALLS = [{"id": "1", "type": "function", "function": {"name": "add", "arguments": {"b": 2, "a": "<é>"}}}]
CONVERSATIONS = {
    "one": Conversation([USER]),
    "system": Conversation([{"role": "system", "content": "Be short."}, USER]),
    "turns": Conversation([{"role": "system", "content": "Be short."}, USER, ASSISTANT, USER]),
    "no prompt": Conversation([USER, ASSISTANT], add_generation_prompt=False),
    "continued": Conversation([USER, ASSISTANT], continues=True),
    "tools": Conversation(
        [
            USER,
            {"role": "assistant", "tool_calls": CALLS},
            {"role": "tool", "content": "4", "tool_call_id": "1"},
        ],
        TOOLS,
    ),
    "thoughts": Conversation(
        [USER, {**ASSISTANT, "reasoning_content": "\n2 and 2\n"}, USER], variables={"enable_thinking": False}
    ),
}


@pytest.fixture(scope="module")
def theirs():
    return PreTrainedTokenizerFast(tokenizer_file=str(DEMO / "target" / "tokenizer.json"), **TOKENS)


@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("style", STYLES)
def test_the_text_is_that_of_transformers(theirs, style, conversation):
    given = CONVERSATIONS[conversation]
    ours = ChatTemplate({"default": STYLES[style]}, TOKENS)
    try:
        expected = theirs.apply_chat_template(
            [{"content": None, **message} for message in given.messages],
            tools=list(given.tools) or None,
            chat_template=STYLES[style],
            tokenize=False,
            add_generation_prompt=given.add_generation_prompt and not given.continues,
            continue_final_message=given.continues,
            **given.variables,
        )
    except Exception:  # a template that does not show the conversation
        with pytest.raises(InvalidArgument):
            ours.render(given)
    else:
        assert ours.render(given) == expected


def test_most_styles_render_most_conversations():
    """The test above compares texts, not refusals alone."""
    refused = 0
    for style in STYLES.values():
        for given in CONVERSATIONS.values():
            try:
                ChatTemplate({"default": style}, TOKENS).render(given)
            except InvalidArgument:
                refused += 1
    assert refused <= len(STYLES) * len(CONVERSATIONS) / 10


def test_a_template_refuses_in_its_own_words():
    source = "{% if messages[0].role != 'user' %}{{ raise_exception('the user begins') }}{% endif %}"
    with pytest.raises(InvalidArgument, match="the user begins"):
        ChatTemplate({"default": source}, {}).render(Conversation([ASSISTANT]))
    ChatTemplate({"default": source}, {}).render(Conversation([USER]))


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ messages[0].update(role='x') }}",
        "{{ 1 / 0 }}",
        "{% for i in range(10 ** 9) %}x{% endfor %}",
        "{% for i in range(99999) %}{{ 'xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx' }}{% endfor %}",
    ],
)
def test_a_template_reaches_nothing_but_its_variables_and_ends(source):
    with pytest.raises(InvalidArgument):
        ChatTemplate({"default": source}, {}).render(Conversation([dict(USER)]))
    assert USER["role"] == "user"


def test_a_template_that_cannot_be_read_is_told_at_the_start():
    with pytest.raises(ValueError, match="chat template cannot be read"):
        ChatTemplate({"default": "{% for m in %}"}, {})


def test_the_template_with_tools_is_another_one():
    both = ChatTemplate({"tool_use": "with", "default": "without"}, {})
    assert (both.render(Conversation([USER], TOOLS)), both.render(Conversation([USER]))) == ("with", "without")
    assert both.source == "without"


def test_a_template_is_a_file_or_a_part_of_the_configuration(tmp_path):
    config, file = tmp_path / "tokenizer_config.json", tmp_path / "chat_template.jinja"
    files = TokenizerFiles(tmp_path / "tokenizer.json", config)
    config.write_text(json.dumps({"bos_token": {"content": "<s>"}, "chat_template": "{{ bos_token }}one"}))
    assert ChatTemplate.read(files).render(Conversation([USER])) == "<s>one"
    named = [{"name": "default", "template": "two"}, {"name": "tool_use", "template": "three"}]
    config.write_text(json.dumps({"bos_token": None, "chat_template": named}))
    assert ChatTemplate.read(files).render(Conversation([USER], TOOLS)) == "three"
    file.write_text("four")
    assert ChatTemplate.read(TokenizerFiles(files.tokenizer, config, file)).source == "four"
    config.write_text("{}")
    assert ChatTemplate.read(files) is None


def test_the_year_is_this_one():
    text = ChatTemplate({"default": "{{ strftime_now('%Y') }}"}, {}).render(Conversation([USER]))
    assert abs(int(text) - datetime.now().year) <= 1


@pytest.mark.parametrize("listed", [[1], ["x"], [None], [[]], [{}], [{"name": "default"}]], ids=str)
def test_a_list_without_templates_is_told_at_the_start(listed, tmp_path):
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": listed}))
    with pytest.raises(ValueError, match=r"tokenizer_config\.json: chat_template"):
        ChatTemplate.read(TokenizerFiles(tmp_path / "tokenizer.json", tmp_path / "tokenizer_config.json"))


@pytest.mark.parametrize("content", [b"\xff\xfe", b"{{ " + b"(" * 10_000 + b" }}"], ids=["no text", "deep"])
def test_a_file_without_a_template_is_told_at_the_start(content, tmp_path):
    (tmp_path / "chat_template.jinja").write_bytes(content)
    with pytest.raises(ValueError, match=r"chat_template\.jinja cannot be read|the chat template cannot be read"):
        ChatTemplate.read(TokenizerFiles(tmp_path / "tokenizer.json", template=tmp_path / "chat_template.jinja"))
