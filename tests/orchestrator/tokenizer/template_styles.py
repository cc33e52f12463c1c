"""Chat templates in the styles of published families: what each of them takes, and what it leaves out.

Written for tests by the structure of those templates: how they walk over messages, contents, calls and arguments.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Style:
    """``arguments``: object or JSON. ``nothing``: the content beside calls. ``walks``: roles with a content that has to
    be in parts. ``shows_parts``: roles with one that may be. ``first_part``: roles of which one part is shown.
    ``apart``: text beside calls is shown where it is another message. ``one_call``: of a message. ``short_ids``: those
    of calls have nine characters. ``lost``: what no form shows."""

    source: str
    arguments: str = "object"
    nothing: str = "absent"
    walks: tuple[str, ...] = ()
    shows_parts: tuple[str, ...] = ()
    first_part: tuple[str, ...] = ()
    apart: bool = False
    one_call: bool = False
    short_ids: bool = False
    lost: tuple[str, ...] = ()


ALL = ("system", "user", "assistant", "tool")
NO_CALLS = ("calls of tools",)
_PROMPT = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
_SYSTEM_AND_TOOLS = """{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- if messages[0]['role'] == 'system' %}
        {{- messages[0]['content'] + '\n\n' }}
    {%- endif %}
    {{- "# Tools\n<tools>" }}
    {%- for tool in tools %}{{- "\n" }}{{- tool | tojson }}{%- endfor %}
    {{- "\n</tools><|im_end|>\n" }}
{%- elif messages[0]['role'] == 'system' %}
    {{- '<|im_start|>system\n' + messages[0]['content'] + '<|im_end|>\n' }}
{%- endif %}
"""
_TOOL_RESULT = """{%- elif message.role == "tool" %}
        {%- if loop.first or messages[loop.index0 - 1].role != "tool" %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\n<tool_response>\n' }}{{- message.content }}{{- '\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != "tool" %}{{- '<|im_end|>\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
"""
_QWEN_3 = """
{%- set ns = namespace(last=messages|length - 1, open=true) %}
{%- for message in messages[::-1] %}
    {%- if ns.open and message.role == "user" and message.content is string
            and not message.content.startswith('<tool_response>') %}
        {%- set ns.open = false %}{%- set ns.last = messages|length - 1 - loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == "user" or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>\n' }}
    {%- elif message.role == "assistant" %}
        {%- set reasoning = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].split('<think>')[-1] %}
            {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\n' }}
        {%- if loop.index0 > ns.last and reasoning %}
            {{- '<think>\n' + reasoning.strip('\n') + '\n</think>\n\n' }}
        {%- endif %}
        {{- content.lstrip('\n') }}
        {%- for tool_call in message.tool_calls or [] %}
            {%- set tool_call = tool_call.function %}
            {{- '\n<tool_call>\n{"name": "' + tool_call.name + '", "arguments": ' }}
            {%- if tool_call.arguments is string %}{{- tool_call.arguments }}
            {%- else %}{{- tool_call.arguments | tojson }}{%- endif %}
            {{- '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    """
_DEEPSEEK = """{{ bos_token }}{% set ns = namespace(system='', first=true) %}
{%- for message in messages %}{%- if message['role'] == 'system' %}
{%- set ns.system = ns.system + message['content'] %}{%- endif %}{%- endfor %}{{ ns.system }}
{%- for message in messages %}
    {%- if message['role'] == 'user' %}{{ '<|User|>' + message['content'] }}{%- endif %}
    {%- if message['role'] == 'assistant' and message['content'] is none %}
        {%- for tool in message['tool_calls'] %}
            {%- if loop.first %}{{ '<|Assistant|><|calls|>' }}{%- else %}{{ '\n' }}{%- endif %}
            {{- '<|call|>' + tool['type'] + '<|sep|>' + tool['function']['name'] + '\n```json\n'
                + tool['function']['arguments'] + '\n```<|end|>' }}
        {%- endfor %}{{ eos_token }}
    {%- endif %}
    {%- if message['role'] == 'assistant' and message['content'] is not none %}
        {%- set content = message['content'] %}
        {%- if '</think>' in content %}{%- set content = content.split('</think>')[-1] %}{%- endif %}
        {{- '<|Assistant|>' + content + eos_token }}
    {%- endif %}
    {%- if message['role'] == 'tool' %}{{ '<|output|>' + message['content'] + '<|output end|>' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|Assistant|>THINK' }}{% endif %}"""
_VISIBLE = """{%- macro visible(content) %}
    {%- if content is string %}{{- content }}
    {%- elif content is iterable and content is not mapping %}
        {%- for item in content %}{%- if item is mapping and item.type == 'text' %}{{- item.text }}
        {%- elif item is string %}{{- item }}{%- endif %}{%- endfor %}
    {%- else %}{{- content }}{%- endif %}
{%- endmacro %}
"""

STYLES = {
    "ChatML, SmolLM2, InternLM": Style(
        "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
        "{{ '<|im_start|>system\nBe helpful<|im_end|>\n' }}{% endif %}"
        "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
        + _PROMPT,
        nothing="empty",
        lost=NO_CALLS,
    ),
    "Yi": Style(
        "{% for message in messages %}{{ '<|im_start|>' }}{{ message['role'] }}{{ '\n' }}{{ message['content'] }}"
        "{{ '<|im_end|>\n' }}{% endfor %}" + _PROMPT,
        lost=NO_CALLS,
    ),
    "Llama 2": Style(
        "{% if messages[0]['role'] == 'system' %}{% set rest = messages[1:] %}{% set system = messages[0]['content'] %}"
        "{% else %}{% set rest = messages %}{% set system = false %}{% endif %}{% for message in rest %}"
        "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
        "{% if loop.index0 == 0 and system %}"
        "{% set content = '<<SYS>>\n' + system + '\n<</SYS>>\n\n' + message['content'] %}"
        "{% else %}{% set content = message['content'] %}{% endif %}"
        "{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}"
        "{% else %}{{ ' ' + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}",
        nothing="empty",
        lost=NO_CALLS,
    ),
    "Llama 3": Style(
        "{% for message in messages %}{% set content = '<|start_header_id|>' + message['role']"
        " + '<|end_header_id|>\n\n'"
        " + message['content'] | trim + '<|eot_id|>' %}{% if loop.index0 == 0 %}{% set content = bos_token + content %}"
        "{% endif %}{{ content }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}",
        lost=NO_CALLS,
    ),
    "Llama 3.1": Style(
        """{{- bos_token }}{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] | trim %}{%- set messages = messages[1:] %}
{%- else %}{%- set system = "" %}{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\n\n" + system + "<|eot_id|>" }}
{%- if tools %}
    {%- set first = messages[0]['content'] | trim %}{%- set messages = messages[1:] %}
    {{- '<|start_header_id|>user<|end_header_id|>\n\nRespond with a call.\n\n' }}
    {%- for t in tools %}{{- t | tojson(indent=4) }}{{- "\n\n" }}{%- endfor %}{{- first + "<|eot_id|>" }}
{%- endif %}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' }}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls | length == 1 %}
            {{- raise_exception("This model only supports single tool-calls at once!") }}
        {%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\n\n{"name": "' + tool_call.name + '", "parameters": ' }}
        {{- tool_call.arguments | tojson }}{{- "}<|eot_id|>" }}
    {%- elif message.role == "tool" or message.role == "ipython" %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\n\n" }}
        {%- if message.content is mapping or message.content is iterable %}{{- message.content | tojson }}
        {%- else %}{{- message.content }}{%- endif %}{{- "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}""",
        one_call=True,
        apart=True,
    ),
    "Mistral": Style(
        """{{- bos_token }}{%- if messages[0]["role"] == "system" %}
    {%- set system = messages[0]["content"] %}{%- set rest = messages[1:] %}
{%- else %}{%- set rest = messages %}{%- endif %}
{%- set users = rest | selectattr("role", "equalto", "user") | list %}
{%- for message in rest %}
    {%- if message["role"] == "user" %}
        {%- if tools is not none and message == users[-1] %}
            {{- "[AVAILABLE_TOOLS]" + tools | tojson + "[/AVAILABLE_TOOLS]" }}
        {%- endif %}
        {%- if loop.first and system is defined %}{{- "[INST]" + system + "\n\n" + message["content"] + "[/INST]" }}
        {%- else %}{{- "[INST]" + message["content"] + "[/INST]" }}{%- endif %}
    {%- elif message["role"] == "tool_calls" or message.tool_calls is defined %}
        {{- "[TOOL_CALLS][" }}
        {%- for call in message.tool_calls %}
            {%- set out = call.function | tojson %}{{- out[:-1] }}
            {%- if call.id is not defined or call.id | length != 9 %}
                {{- raise_exception("Tool call IDs should be alphanumeric strings with length 9!") }}
            {%- endif %}
            {{- ', "id": "' + call.id + '"}' }}{{- ", " if not loop.last else "]" + eos_token }}
        {%- endfor %}
    {%- elif message["role"] == "assistant" %}{{- message["content"] + eos_token }}
    {%- elif message["role"] == "tool" %}
        {{- '[TOOL_RESULTS]{"content": ' + message.content | string + ', "call_id": "' + message.tool_call_id + '"}' }}
    {%- else %}{{- raise_exception("Only user and assistant roles are supported!") }}{%- endif %}
{%- endfor %}""",
        short_ids=True,
        apart=True,
    ),
    "Gemma": Style(
        "{{ bos_token }}{% if messages[0]['role'] == 'system' %}"
        "{{ raise_exception('System role not supported') }}{% endif %}"
        "{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
        "{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}"
        "{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}",
        lost=NO_CALLS,
    ),
    "Gemma 3": Style(
        """{{ bos_token }}{%- if messages[0]['role'] == 'system' -%}
    {%- if messages[0]['content'] is string -%}{%- set prefix = messages[0]['content'] + '\n\n' -%}
    {%- else -%}{%- set prefix = messages[0]['content'][0]['text'] + '\n\n' -%}{%- endif -%}
    {%- set rest = messages[1:] -%}
{%- else -%}{%- set prefix = "" -%}{%- set rest = messages -%}{%- endif -%}
{%- for message in rest -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception("Roles must alternate") }}
    {%- endif -%}
    {%- set role = "model" if message['role'] == 'assistant' else message['role'] -%}
    {{ '<start_of_turn>' + role + '\n' + (prefix if loop.first else "") }}
    {%- if message['content'] is string -%}{{ message['content'] | trim }}
    {%- elif message['content'] is iterable -%}
        {%- for item in message['content'] -%}{%- if item['type'] == 'image' -%}{{ '<image>' }}
        {%- elif item['type'] == 'text' -%}{{ item['text'] | trim }}{%- endif -%}{%- endfor -%}
    {%- else -%}{{ raise_exception("Invalid content type") }}{%- endif -%}
    {{ '<end_of_turn>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<start_of_turn>model\n' }}{%- endif -%}""",
        shows_parts=("user", "assistant"),
        first_part=("system",),
        lost=NO_CALLS,
    ),
    "Phi": Style(
        "{% for message in messages %}{% if message['role'] == 'system' and message['content'] %}"
        "{{ '<|system|>\n' + message['content'] + '<|end|>\n' }}{% elif message['role'] == 'user' %}"
        "{{ '<|user|>\n' + message['content'] + '<|end|>\n' }}{% elif message['role'] == 'assistant' %}"
        "{{ '<|assistant|>\n' + message['content'] + '<|end|>\n' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}",
        nothing="empty",
        lost=(*NO_CALLS, "text of tool", "parts of tool"),
    ),
    "Qwen 2.5": Style(
        _SYSTEM_AND_TOOLS
        + """{%- for message in messages %}
    {%- if message.role == "user" or (message.role == "system" and not loop.first)
            or (message.role == "assistant" and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}
    {%- elif message.role == "assistant" %}
        {{- '<|im_start|>' + message.role }}
        {%- if message.content %}{{- '\n' + message.content }}{%- endif %}
        {%- for tool_call in message.tool_calls %}
            {%- if tool_call.function is defined %}{%- set tool_call = tool_call.function %}{%- endif %}
            {{- '\n<tool_call>\n{"name": "' }}{{- tool_call.name }}{{- '", "arguments": ' }}
            {{- tool_call.arguments | tojson }}{{- '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    """
        + _TOOL_RESULT
        + _PROMPT,
    ),
    "Qwen 3": Style(
        _SYSTEM_AND_TOOLS
        + _QWEN_3
        + _TOOL_RESULT
        + _PROMPT
        + "{% if add_generation_prompt and enable_thinking is defined"
        " and enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
    ),
    "QwQ, Qwen 3 Thinking": Style(
        _SYSTEM_AND_TOOLS
        + _QWEN_3
        + _TOOL_RESULT
        + "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"
    ),
    "Qwen 3 Coder": Style(
        """{%- if tools %}{{- tools | tojson }}{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + (message.role if message.role != 'tool' else 'user') + '\n' }}
    {%- if message.content is defined and message.content is string and message.content | trim | length > 0 %}
        {{- message.content | trim + '\n' }}
    {%- endif %}
    {%- for tool_call in message.tool_calls or [] %}
        {{- '<tool_call>\n<function=' + tool_call.function.name + '>\n' }}
        {%- for name, value in tool_call.function.arguments | items %}
            {{- '<parameter=' + name + '>\n' }}
            {{- value | tojson if value is mapping or (value is sequence and value is not string) else value | string }}
            {{- '\n</parameter>\n' }}
        {%- endfor %}
        {{- '</function>\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\n' }}
{%- endfor %}"""
        + _PROMPT,
    ),
    "DeepSeek V3": Style(_DEEPSEEK.replace("THINK", ""), arguments="JSON", nothing="null", apart=True),
    "DeepSeek R1": Style(_DEEPSEEK.replace("THINK", "<think>\\n"), arguments="JSON", nothing="null", apart=True),
    "Command R": Style(
        """{{ bos_token }}{% for message in messages %}
{%- if message.role == 'tool' %}{{ '<results>\n' + message.content + '\n</results>' }}
{%- else %}{{ '<|START|><|' + message.role | upper + '|>' }}
{%- if message.content is defined %}{{ message.content }}{% endif %}
{%- if message.tool_calls is defined %}{{ 'Action:\n```json\n[' }}{% for call in message.tool_calls %}
{{- '\n    {"tool_name": "' }}{{ call['function']['name'] }}{{ '", "parameters": ' }}
{{- call['function']['arguments'] | tojson }}
{{- '}' }}{% if not loop.last %},{% endif %}{% endfor %}{{ '\n]\n```' }}{% endif %}{{ '<|END|>' }}
{%- endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|START|><|CHATBOT|>' }}{% endif %}"""
    ),
    "Hermes": Style(
        """{% for tool in tools or [] %}{{ tool.function.name ~ ': ' ~ tool.function.parameters | tojson }}{% endfor %}
{%- for message in messages %}
    {%- if message.role == "user" or message.role == "system"
            or (message.role == "assistant" and message.tool_calls is not defined) %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}
    {%- elif message.role == "assistant" %}
        {{- '<|im_start|>' + message.role }}
        {%- for tool_call in message.tool_calls %}
            {{- '\n<tool_call>\n' }}
            {%- if tool_call.function is defined %}{%- set tool_call = tool_call.function %}{%- endif %}
            {{- '{"name": "' }}{{- tool_call.name }}{{- '", "arguments": ' }}{{- tool_call.arguments | tojson }}
            {{- '}\n</tool_call>' }}
        {%- endfor %}{{- '<|im_end|>\n' }}
    """
        + _TOOL_RESULT
        + _PROMPT,
        apart=True,
    ),
    "GPT-OSS": Style(
        """<|start|>system<|message|>Effort: {{ reasoning_effort if reasoning_effort is defined else 'medium' }}<|end|>
{%- for message in messages %}
    {%- if message.role == 'assistant' and "tool_calls" in message %}
        {%- if message.content and message.thinking %}
            {{- raise_exception("Cannot pass both content and thinking") }}
        {%- endif %}
        {%- if message.content or message.thinking %}
            {{- "<|start|>assistant<|channel|>analysis<|message|>" }}
            {{- (message.content or message.thinking) + "<|end|>" }}
        {%- endif %}
        {%- for call in message.tool_calls %}{%- set tool_call = call.function %}
            {{- "<|start|>assistant to=functions." + tool_call.name + "<|channel|>commentary json<|message|>" }}
            {{- tool_call.arguments | tojson }}{{- "<|call|>" }}
        {%- endfor %}
    {%- elif message.role == 'tool' %}
        {{- "<|start|>tool to=assistant<|channel|>commentary<|message|>" + message.content | tojson + "<|end|>" }}
    {%- else %}{{- "<|start|>" + message.role + "<|message|>" + message.content + "<|end|>" }}{%- endif %}
{%- endfor %}{%- if add_generation_prompt %}<|start|>assistant{% endif %}"""
    ),
    "Zephyr": Style(
        "{% for message in messages %}\n{% if message['role'] == 'user' %}\n"
        "{{ '<|user|>\n' + message['content'] + eos_token }}\n"
        "{% elif message['role'] == 'system' %}\n{{ '<|system|>\n' + message['content'] + eos_token }}\n"
        "{% elif message['role'] == 'assistant' %}\n{{ '<|assistant|>\n'  + message['content'] + eos_token }}\n"
        "{% endif %}\n"
        "{% if loop.last and add_generation_prompt %}\n{{ '<|assistant|>' }}\n{% endif %}\n{% endfor %}",
        nothing="empty",
        lost=(*NO_CALLS, "text of tool", "parts of tool"),
    ),
    "Falcon": Style(
        "{% for message in messages %}{% if not loop.first %}{{ '\n' }}{% endif %}"
        "{{ message['role'].capitalize() + ': ' }}{{ message['content'].strip().replace('\r\n', '\n') }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '\nAssistant:' }}{% endif %}",
        nothing="empty",
        lost=NO_CALLS,
    ),
    "Granite": Style(
        """{%- if tools %}<|start_of_role|>tools<|end_of_role|>{{ tools | tojson(indent=4) }}<|end_of_text|>
{% endif %}{%- for message in messages %}
    {%- set content = message['content'] if message['content'] is string
            else message['content'] | map(attribute='text') | join(' ') %}
    {%- if message['role'] == 'assistant' and message.tool_calls %}
        {{- '<|start_of_role|>assistant<|end_of_role|>' + content }}
        {%- for call in message.tool_calls %}
            {{- '<|tool_call|>' + {"name": call.function.name, "arguments": call.function.arguments} | tojson }}
        {%- endfor %}{{- '<|end_of_text|>\n' }}
    {%- else %}
        {{- '<|start_of_role|>' + message['role'] + '<|end_of_role|>' + content + '<|end_of_text|>\n' }}
    {%- endif %}
{%- endfor %}{%- if add_generation_prompt %}{{- '<|start_of_role|>assistant<|end_of_role|>' }}{%- endif %}""",
        shows_parts=ALL,
    ),
    "OLMo": Style(
        "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'assistant' %}"
        "{{ '<|assistant|>\n' }}{% if message['content'] is not none %}{{ message['content'] }}{% endif %}"
        "{% for call in message.tool_calls or [] %}{{ call.function.name + '(' }}"
        "{% for key, value in call.function.arguments.items() %}{{ key + '=' + value | tojson }}{% endfor %}{{ ')' }}"
        "{% endfor %}{{ eos_token + '\n' }}{% else %}{{ '<|' + message['role'] + '|>\n' + message['content'] + '\n' }}"
        "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
    ),
    "MiniMax M2, GLM 4.5": Style(
        _VISIBLE
        + """{%- for message in messages %}
    {%- if message.role == 'assistant' %}{{- ']~b]ai\n' }}
        {%- if message.reasoning_content is string and message.reasoning_content %}
            {{- '<think>\n' + message.reasoning_content + '\n</think>\n\n' }}
        {%- endif %}
        {%- if message.content %}{{- visible(message.content) }}{%- endif %}
        {%- for call in message.tool_calls or [] %}{{- '<invoke name="' + call.function.name + '">' }}
            {%- for k, v in call.function.arguments.items() %}
                {{- '<parameter name="' + k + '">' }}{{- v | tojson if v is not string else v }}{{- '</parameter>' }}
            {%- endfor %}{{- '</invoke>\n' }}
        {%- endfor %}{{- '[e~[\n' }}
    {%- else %}{{- ']~b]' + message.role + '\n' }}{{- visible(message.content) }}{{- '[e~[\n' }}{%- endif %}
{%- endfor %}{%- if add_generation_prompt %}{{- ']~b]ai\n<think>\n' }}{%- endif %}""",
        shows_parts=ALL,
    ),
    "Kimi K2": Style(
        _VISIBLE
        + """{%- for message in messages %}<|im_{{ message.role }}|>
{%- if message.content %}{{ visible(message.content) }}{% endif %}
{%- for call in message.get('tool_calls', []) or [] %}<|call|>{{ call.id }}:{{ call.function.name }}<|arguments|>
{%- if call.function.arguments is string %}{{ call.function.arguments }}
{%- else %}{{ call.function.arguments | tojson }}{% endif %}
{%- endfor %}<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_assistant|>{% endif %}""",
        shows_parts=ALL,
    ),
    "calls as a text": Style(
        "{% for m in messages %}{{ m.role ~ ': ' ~ m.content }}{% for c in m.tool_calls or [] %}"
        "{{ '\n' ~ c.function.name ~ ' ' ~ c.function.arguments }}{% endfor %}{{ '\n' }}{% endfor %}",
        arguments="JSON",
    ),
    "LLaVA": Style(
        "{% for message in messages %}{{ message['role'].upper() + ': ' }}"
        "{% for content in message['content'] | selectattr('type', 'equalto', 'image') %}{{ '<image>\n' }}{% endfor %}"
        "{% for content in message['content'] | selectattr('type', 'equalto', 'text') %}"
        "{{ content['text'] + ' ' }}{% endfor %}"
        "{% endfor %}{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}",
        walks=ALL,
        lost=NO_CALLS,
    ),
    "SmolVLM": Style(
        "{% for message in messages %}{{ message['role'] | capitalize }}"
        "{% if message['content'][0]['type'] == 'image' %}{{ ':' }}{% else %}{{ ': ' }}{% endif %}"
        "{% for line in message['content'] %}{% if line['type'] == 'text' %}{{ line['text'] }}{% endif %}{% endfor %}"
        "<end_of_utterance>\n{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}",
        nothing="empty part",
        walks=ALL,
        lost=NO_CALLS,
    ),
    "MiniMax Text": Style(
        "{% for message in messages %}{{ '<beginning_of_sentence>' + message['role'] + ' name=x\n' }}"
        "{{ message['content'][0]['text'] }}{{ '<end_of_sentence>\n' }}{% endfor %}",
        nothing="empty part",
        walks=ALL,
        first_part=ALL,
        lost=NO_CALLS,
    ),
}
