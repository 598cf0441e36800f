"""Chat templates that write tools, calls and reasoning as published ones do, much shortened."""

from __future__ import annotations

CHATML = """\
{%- if tools %}{{- '<|im_start|>system\\n# Tools\\n<tools>' }}
{%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
{{- '\\n</tools>\\n' }}HOW{{- '<|im_end|>\\n' }}{%- endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>\\n' + message.content }}
{{- '\\n</tool_response><|im_end|>\\n' }}
{%- else %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.reasoning_content %}
{{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}{%- endif %}
{%- if message.content is string %}{{- message.content }}{%- else %}
{%- for item in message.content %}{%- if item.type == 'image' %}
{{- '<|vision_start|><|image_pad|><|vision_end|>' }}{%- else %}{{- item.text }}{%- endif %}
{%- endfor %}{%- endif %}
{%- for call in message.tool_calls or [] %}{%- set f = call.function %}
CALL
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}
{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}{%- endif %}"""


def chatml(*, how: str, call: str) -> str:
    return CHATML.replace("HOW", how).replace("CALL", call)


HERMES = chatml(
    how="{{- 'Answer <tool_call></tool_call>.' }}",
    call='{{- \'\\n<tool_call>\\n{"name": "\' + f.name + \'", "arguments": \' }}'
    "{{- f.arguments | tojson }}{{- '}\\n</tool_call>' }}",
)
QWEN3_XML = chatml(
    how="{{- 'Answer <tool_call><function=x></function></tool_call>.' }}",
    call="{{- '\\n<tool_call>\\n<function=' + f.name + '>\\n' }}"
    "{%- for k, v in f.arguments.items() %}{{- '<parameter=' + k + '>\\n' }}"
    "{{- v if v is string else v | tojson }}{{- '\\n</parameter>\\n' }}{%- endfor %}"
    "{{- '</function>\\n</tool_call>' }}",
)
GLM4 = chatml(
    how="{{- 'Answer <tool_call>x<arg_key>k</arg_key></tool_call>.' }}",
    call="{{- '\\n<tool_call>' + f.name + '\\n' }}"
    "{%- for k, v in f.arguments.items() %}{{- '<arg_key>' + k + '</arg_key>\\n<arg_value>' }}"
    "{{- v if v is string else v | tojson }}{{- '</arg_value>\\n' }}{%- endfor %}"
    "{{- '</tool_call>' }}",
)
GEMMA4 = chatml(
    how="{{- 'Answer <|tool_call>call:x{}<tool_call|>.' }}",
    call="{%- macro put(v) %}"
    "{%- if v is string %}{{- '<|\"|>' + v + '<|\"|>' }}"
    "{%- elif v is mapping %}{{- '{' }}{%- for k, x in v.items() %}{{- k + ':' }}{{- put(x) }}"
    "{{- ',' if not loop.last }}{%- endfor %}{{- '}' }}"
    "{%- elif v is iterable %}{{- '[' }}{%- for x in v %}{{- put(x) }}{{- ',' if not loop.last }}"
    "{%- endfor %}{{- ']' }}{%- else %}{{- v | tojson }}{%- endif %}{%- endmacro %}"
    "{{- '<|tool_call>call:' + f.name }}{{- put(f.arguments) }}{{- '<tool_call|>' }}",
)
MISTRAL = chatml(
    how="",
    call="{%- if call.id | length != 9 %}{{- raise_exception('nine') }}{%- endif %}"
    "{{- '[TOOL_CALLS][' if loop.first else ', ' }}"
    "{{- {'name': f.name, 'arguments': f.arguments} | tojson }}{{- ']' if loop.last }}",
)
MISTRAL_ARGS = chatml(
    how="",
    call="{{- '[TOOL_CALLS]' + f.name + '[ARGS]' }}{{- f.arguments | tojson }}",
)
LLAMA3_JSON = chatml(
    how='{{- \'{"name": x, "parameters": {}} <|start_header_id|>\' }}',
    call="{{- '; ' if not loop.first }}"
    "{{- '{\"name\": \"' + f.name + '\", \"parameters\": ' }}{{- f.arguments | tojson }}{{- '}' }}",
)
AS_TEXT = chatml(
    how="{{- '<tool_call>' }}",
    call='{{- \'\\n<tool_call>\\n{"name": "\' + f.name + \'", "arguments": \' + f.arguments }}'
    "{{- '}\\n</tool_call>' }}",
)

TEMPLATES = {
    "hermes": HERMES, "qwen3_xml": QWEN3_XML, "glm4": GLM4, "gemma4": GEMMA4, "mistral": MISTRAL,
    "mistral_args": MISTRAL_ARGS, "llama3_json": LLAMA3_JSON,
}  # fmt: skip
