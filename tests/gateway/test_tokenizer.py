"""The tokenizer and its chat template, against transformers where that is the standard."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from gateway.templates import ChatTemplate, TemplateRefused
from gateway.tokenizer import ModelTokenizer
from outrider.model_error import ModelError
from tests.support.gateways import write_tokenizer_folder

CHATS = [
    [("user", "Hi there")],
    [("system", "Be brief."), ("user", "  two  spaces \n\n"), ("assistant", "ok"), ("user", "")],
    [("user", "special <|im_end|> inside"), ("assistant", "a & b < c \"quoted\" 'x'")],
    [("user", "\U0001f469\u200d\U0001f467 \ub9cc\ub098\uc11c \u0645\u0631\u062d\u0628\u0627")],
]
TEMPLATES = {
    "blocks": (
        "{%- for m in messages %}\n    {%- if loop.first %}\n  first {{ bos_token }}\n"
        "    {%- endif %}\n{{ m.role }}: {{ m.content | trim }}\n"
        "  {% if m.role == 'user' %}\nu\n  {% endif %}\n{% endfor %}{{ eos_token }}\n"
    ),
    "json": "{{ messages | tojson }}|{{ messages | tojson(indent=2) }}|{{ tools is none }}",
    "loop controls": "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}"
    "{{ m['content'] }}{% endfor %}",
    "namespace": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}"
    "{% endfor %}{{ ns.n }}{{ dict(a=1) | tojson }}",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}"
    "{% endfor %}",
    "date": "{{ strftime_now('%Y') }} {{ add_generation_prompt }} {{ pad_token is defined }}",
    "html": "{{ '<b>&' }}{{ messages[0].content | upper }}",
}


def as_dicts(chat: list[tuple[str, str]]) -> list[dict[str, str]]:
    """Messages as transformers takes them."""
    return [{"role": role, "content": content} for role, content in chat]


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("chat", CHATS)
def test_templates_render_as_in_transformers(name: str, chat: list[tuple[str, str]]) -> None:
    """Same sandbox, same whitespace rules, same helpers: the same prompt."""
    from transformers.utils.chat_template_utils import render_jinja_template

    tokens = {"bos_token": "<s>", "eos_token": "</s>"}
    (theirs,), _ = render_jinja_template(
        [as_dicts(chat)], chat_template=TEMPLATES[name], add_generation_prompt=True, **tokens
    )
    assert ChatTemplate(TEMPLATES[name], tokens).render(chat) == theirs


@pytest.mark.parametrize("chat", CHATS)
def test_smollm2_as_in_transformers(smollm2_folder: Path, chat: list[tuple[str, str]]) -> None:
    """The real model's ids, for chats and plain texts, are those of transformers."""
    from transformers import PreTrainedTokenizerFast

    theirs = PreTrainedTokenizerFast.from_pretrained(str(smollm2_folder))
    ours = ModelTokenizer.load(smollm2_folder)
    rendered = theirs.apply_chat_template(
        as_dicts(chat), add_generation_prompt=True, tokenize=False
    )
    assert ours.encode_chat(chat) == theirs.encode(rendered, add_special_tokens=False)
    for _, content in chat:
        assert ours.encode(content) == theirs.encode(content)


def test_templates_can_refuse() -> None:
    """raise_exception and errors of the template become one error with the template's words."""
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}", {})
    with pytest.raises(TemplateRefused, match="roles must alternate"):
        template.render([("user", "x")])


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
    ],
)
def test_templates_cannot_leave_the_sandbox(source: str) -> None:
    """A template reaches neither the interpreter nor the caller's objects."""
    with pytest.raises(TemplateRefused):
        ChatTemplate(source, {}).render([("user", "x")])


def test_special_tokens_in_text_become_tokens(tiny_folder: Path) -> None:
    """A string that spells a special token is that token, in plain text as in transformers."""
    tokenizer = ModelTokenizer.load(tiny_folder)
    assert tokenizer.encode("a<|im_end|>")[-1] == 2


def test_template_from_its_own_file(tmp_path: Path) -> None:
    """chat_template.jinja goes before the one in tokenizer_config.json."""
    folder = write_tokenizer_folder(tmp_path / "m")
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}{{ eos_token }}")
    tokenizer = ModelTokenizer.load(folder)
    assert tokenizer.encode_chat([("user", "END")]) == [*tokenizer.encode("END"), 2]


def test_no_template_is_said(tmp_path: Path) -> None:
    """A model without a template refuses chats and nothing else."""
    folder = write_tokenizer_folder(tmp_path / "m")
    (folder / "tokenizer_config.json").unlink()
    tokenizer = ModelTokenizer.load(folder)
    with pytest.raises(TemplateRefused, match="no chat template"):
        tokenizer.encode_chat([("user", "x")])
    assert tokenizer.encode("x")


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_missing_and_broken_files_are_named(tmp_path: Path, name: str) -> None:
    """The error says which file of the folder is wrong."""
    folder = write_tokenizer_folder(tmp_path / "m")
    for text in ("{", "[]", '{"vocab_size": null, "model": 1}'):
        (folder / name).write_text(text)
        with pytest.raises(ModelError, match=name):
            ModelTokenizer.load(folder)
    (folder / name).unlink()
    with pytest.raises(ModelError, match=name):
        ModelTokenizer.load(folder)


def test_torch_is_never_imported(tiny_folder: Path) -> None:
    """After the gateway has loaded a tokenizer and used it, torch is not there."""
    program = (
        "import sys, gateway.service\n"
        "from pathlib import Path\n"
        "from gateway.tokenizer import ModelTokenizer\n"
        "from outrider.engine.fingerprints import token_table_hash\n"
        "folder = Path(sys.argv[1])\n"
        "tokenizer = ModelTokenizer.load(folder)\n"
        "tokenizer.encode_chat([('user', 'x')]), token_table_hash(folder)\n"
        "sys.exit('torch' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(tiny_folder)], timeout=60)
    assert done.returncode == 0
