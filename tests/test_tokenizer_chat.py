"""Chat templates: rendered text against transformers, and what a sandbox must not allow."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import transformers

import model_factory
from fastserve.errors import ModelError
from fastserve.models.resolve import resolve
from fastserve.text.chat_template import ChatTemplate, ChatTemplateError
from fastserve.text.tokenizer import Tokenizer

# In the manner of the models that people use, written for this test.
TEMPLATES = {
    "chatml": model_factory.CHAT_TEMPLATE,
    "llama3": """
{{- bos_token }}
{%- if not date_string is defined %}
    {%- set date_string = strftime_now("%d %b %Y") %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\nToday: " + date_string + "\\n\\n" }}
{%- if tools is not none %}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\\n\\n" }}
    {%- endfor %}
{%- endif %}
{{- system_message + "<|eot_id|>" }}
{%- for message in messages %}
    {%- if 'tool_calls' in message %}
        {%- if message.tool_calls|length != 1 %}
            {{- raise_exception("This model only supports single tool-calls at once!") }}
        {%- endif %}
        {{- '{"name": "' + message.tool_calls[0].function.name + '", "parameters": ' }}
        {{- message.tool_calls[0].function.arguments | tojson }}{{- "}<|eot_id|>" }}
    {%- else %}
        {{- '<|' + message['role'] + '|>\\n\\n' + message['content'] | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>\\n\\n' }}{%- endif %}
""",
    "alternating": """
{%- set ns = namespace(last='') -%}
{{ bos_token }}
{%- for message in messages -%}
    {%- if message['role'] == ns.last -%}
        {{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
    {%- endif -%}
    {%- set ns.last = message['role'] -%}
    {%- if message['role'] == 'user' %} [INST] {{ message['content'] }} [/INST]
    {%- else %} {{ message['content'] }}{{ eos_token }}{% endif -%}
{%- endfor -%}
""",
    "loops": """
{%- for message in messages %}
    {%- if message.role == 'skip' %}{% continue %}{% endif %}
    {%- if message.role == 'stop' %}{% break %}{% endif %}
    {% generation %}
    {{ loop.index0 }}:{{ message.content }}
    {% endgeneration %}
{%- endfor %}
{{ {'b': 1, 'a': '<é>'} | tojson(sort_keys=True) }}
""",
    "thinking": """
{%- for m in messages -%}
<{{ m.role }}>{{ m.content if m.content is string else m.content[0].text }}</{{ m.role }}>
{% endfor -%}
{%- if enable_thinking is defined and enable_thinking is false -%}<think></think>{%- endif -%}
{%- for d in documents or [] -%}[{{ d.title }}: {{ d.text }}]{%- endfor -%}
""",
}
CHATS: dict[str, list[dict[str, Any]]] = {
    "one": [{"role": "user", "content": "Hello <world> & \"you\" 'é' 你好"}],
    "system": [
        {"role": "system", "content": "  Be brief.\n"},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello!  "},
        {"role": "user", "content": "  Bye"},
    ],
    "same twice": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}],
    "tool call": [
        {"role": "user", "content": "What is 2 + 2?"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"function": {"name": "add", "arguments": {"a": 2, "b": "2 < 3"}}}],
        },
        {"role": "tool", "content": "4"},
    ],
    "parts": [{"role": "user", "content": [{"type": "text", "text": "in a list"}]}],
    "flow": [
        {"role": "skip", "content": "no"},
        {"role": "user", "content": "yes"},
        {"role": "stop", "content": "no"},
        {"role": "user", "content": "no"},
    ],
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds <two> numbers.",
            "parameters": {"type": "object", "properties": {"a": {"type": "number"}}},
        },
    }
]
OPTIONS: dict[str, dict[str, Any]] = {
    "prompt": {"add_generation_prompt": True},
    "no prompt": {"add_generation_prompt": False},
    "tools": {"add_generation_prompt": True, "tools": TOOLS},
    "documents": {
        "add_generation_prompt": False,
        "documents": [{"title": "T", "text": "body"}],
        "enable_thinking": False,
    },
    "go on": {"add_generation_prompt": False, "continue_final_message": True},
}


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    model_factory.write_tokenizer(folder)
    (folder / "config.json").write_text("{}")
    return folder


@pytest.fixture(scope="session")
def theirs(folder) -> transformers.PreTrainedTokenizerBase:
    return transformers.AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_text_equals_transformers(name, chat, options, folder, theirs):
    """Where one of the two refuses, so does the other."""
    messages, chosen = CHATS[chat], OPTIONS[options]
    try:
        want = theirs.apply_chat_template(
            messages, chat_template=TEMPLATES[name], tokenize=False, **chosen
        )
    except Exception:
        want = None
    tokenizer = Tokenizer.from_source(resolve(folder))
    tokenizer.chat_templates = {"default": TEMPLATES[name]}
    if want is None:
        with pytest.raises(ChatTemplateError):
            tokenizer.render_chat(messages, **chosen)
    else:
        assert tokenizer.render_chat(messages, **chosen) == want


@pytest.mark.parametrize("chat", ["one", "system", "same twice"])
@pytest.mark.parametrize("options", ["prompt", "no prompt", "go on"])
def test_smollm2_equals_transformers(chat, options):
    source = resolve("smollm2")
    tokenizer = Tokenizer.from_source(source)
    theirs = model_factory.reference_tokenizer(source.path)
    # Not every release of transformers takes the template from the file.
    template = source.gguf.metadata["tokenizer.chat_template"]
    options, messages = OPTIONS[options], CHATS[chat]
    text = theirs.apply_chat_template(messages, chat_template=template, tokenize=False, **options)
    assert tokenizer.render_chat(messages, **options) == text
    want = theirs.encode(text, add_special_tokens=False)
    assert tokenizer.apply_chat_template(messages, **options) == want


def test_the_date_is_todays():
    template = ChatTemplate("{{ strftime_now('%Y-%m-%d') }}", {}, "here")
    assert template.render([]) == datetime.now().strftime("%Y-%m-%d")


def test_where_templates_are_found(folder, tmp_path):
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    settings = json.loads((folder / "tokenizer_config.json").read_text())

    def templates(**changes: Any) -> dict[str, str]:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings | changes))
        return Tokenizer.from_source(resolve(tmp_path)).chat_templates

    assert templates(chat_template="A") == {"default": "A"}
    named = [{"name": "default", "template": "B"}, {"name": "tool_use", "template": "C"}]
    assert templates(chat_template=named) == {"default": "B", "tool_use": "C"}
    tokenizer = Tokenizer.from_source(resolve(tmp_path))
    assert tokenizer.render_chat([]) == "B"
    assert tokenizer.render_chat([], tools=TOOLS) == "C"
    (tmp_path / "chat_template.jinja").write_text("D")
    assert templates(chat_template="A") == {"default": "D"}


def test_no_template_says_what_to_do(folder, tmp_path):
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    model_factory.write_tokenizer(tmp_path, chat_template=None)
    tokenizer = Tokenizer.from_source(resolve(tmp_path))
    assert not tokenizer.has_chat_template
    with pytest.raises(ModelError) as caught:
        tokenizer.apply_chat_template(CHATS["one"])
    assert str(caught.value) == (
        f"{tmp_path}: the model has no chat template, so it takes prompts and not messages; use "
        "generate, or /v1/completions, or an instruction-tuned model"
    )


@pytest.mark.parametrize(
    ("template", "messages", "want"),
    [
        (
            "{{ raise_exception('roles must alternate') }}",
            [],
            "the model's chat template refuses these messages: roles must alternate",
        ),
        (
            "{{ messages[0].content + 1 }}",
            [{"content": "x"}],
            "the model's chat template refuses these messages: TypeError: can only concatenate str",
        ),
        ("x", ["hello"], "messages[0] is a str; want an object with role and content"),
        (
            "x",
            [{"role": "user", "content": [{"image": object()}]}],
            "messages[0].content[0].image is a object; want JSON values",
        ),
    ],
)
def test_bad_messages_are_explained(template, messages, want):
    with pytest.raises(ChatTemplateError) as caught:
        ChatTemplate(template, {}, "here").render(messages)
    assert str(caught.value).startswith(want)


def test_both_ends_at_once_are_refused():
    template = ChatTemplate(model_factory.CHAT_TEMPLATE, {}, "here")
    with pytest.raises(ChatTemplateError, match="want at most one"):
        template.render(CHATS["one"], add_generation_prompt=True, continue_final_message=True)


def test_a_broken_template_is_the_models_fault():
    with pytest.raises(ModelError, match=r"^here: line 2 of the chat template: "):
        ChatTemplate("{{ a }}\n{% if %}", {}, "here")


@pytest.mark.parametrize(
    "attack",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.__class__.__base__.__subclasses__() }}",
        "{{ raise_exception.__globals__.keys() }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ messages.append('x') }}",
        "{{ messages[0].update(role='x') }}",
        "{% set n = namespace() %}{{ n.__init__.__globals__ }}",
        "{{ lipsum.__globals__['os'] }}",
    ],
)
def test_the_sandbox_holds(attack):
    with pytest.raises(ChatTemplateError, match=r"unsafe|no attribute"):
        ChatTemplate(attack, {}, "here").render([{"role": "user"}])


def test_the_callers_messages_are_not_touched():
    messages = [{"role": "user", "content": [{"type": "text", "text": "a"}], "name": None}]
    before = json.dumps(messages)
    template = ChatTemplate(TEMPLATES["thinking"], {}, "here")
    template.render(messages, add_generation_prompt=False, continue_final_message=True)
    assert json.dumps(messages) == before
