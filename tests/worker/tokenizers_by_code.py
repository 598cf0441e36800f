"""Tokenizers of a few hundred tokens that split text as Llama's and Gemma's do, and chat templates.

Llama    a space is put before every piece of text; a line break is a byte
Gemma    no such space; two or three line breaks are one token
"""

from __future__ import annotations

import itertools
import string
from collections.abc import Sequence
from typing import Any

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

WORDS = ("the", "and", "what", "is", "this", "color", "red", "blue", "how", "many", "user", "model")
LETTERS = (*string.ascii_letters, *string.digits, *".,:;!?'\"()<>|/_-", "▁")
SPECIAL = ("<pad>", "<s>", "</s>", "<unk>")
NUM_TEXT_TOKENS = 340
VOCAB_SIZE = 448
IMAGE, IMAGE_START, IMAGE_END, TURN_START, TURN_END = range(440, 445)


def llama() -> Any:
    """As LLaVA-1.5's: `<image>` stands for an image."""
    tokenizer = _byte_pairs(())
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )  # fmt: skip
    return _fast(tokenizer, {IMAGE: "<image>"})


def llama_of_late() -> Any:
    """As newer conversions of it: only the beginning of a text gets a space."""
    tokenizer = llama()
    backend = tokenizer.backend_tokenizer
    backend.normalizer = None
    backend.pre_tokenizer = pre_tokenizers.Metaspace(
        replacement="▁", prepend_scheme="first", split=False
    )
    return tokenizer


def gemma() -> Any:
    """As Gemma 3's: a template writes `<start_of_image>`, its processor what is around it."""
    tokenizer = _byte_pairs(("\n", "\n\n", "\n\n\n"))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    named = {
        "image_token": "<image_soft_token>",
        "boi_token": "<start_of_image>",
        "eoi_token": "<end_of_image>",
    }
    tokens = {
        IMAGE: "<image_soft_token>",
        IMAGE_START: "<start_of_image>",
        IMAGE_END: "<end_of_image>",
        TURN_START: "<start_of_turn>",
        TURN_END: "<end_of_turn>",
    }
    return _fast(tokenizer, tokens, extra_special_tokens=named)


def _byte_pairs(breaks: Sequence[str]) -> Tokenizer:
    """Bytes, letters, words with a space before them, and runs of line breaks."""
    vocab = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *LETTERS, *breaks]
    merges: list[tuple[str, str]] = [
        (longer[:-1], longer[-1]) for longer in breaks if len(longer) > 1
    ]
    for word in WORDS:
        for end in range(2, len(word) + 2):
            pair = (f"▁{word}"[: end - 1], word[end - 2])
            if pair not in merges:
                merges.append(pair)
                vocab.append("".join(pair))
    assert NUM_TEXT_TOKENS <= len(vocab) <= IMAGE
    fillers = itertools.count()
    vocab += [f"<unused{next(fillers)}>" for _ in range(IMAGE - len(vocab))]
    ids = {token: i for i, token in enumerate(vocab)}
    tokenizer = Tokenizer(
        models.BPE(ids, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    return tokenizer


def _fast(tokenizer: Tokenizer, tokens: dict[int, str], **options: Any) -> Any:
    from transformers import PreTrainedTokenizerFast

    for token_id, token in sorted(tokens.items()):
        tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False)])
        assert tokenizer.token_to_id(token) == token_id
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>",
        pad_token="<pad>", **options,
    )  # fmt: skip


LLAVA_TEMPLATE = """\
{% for message in messages %}\
{% if message['role'] != 'system' %}{{ message['role'].upper() + ': '}}{% endif %}\
{% for content in message['content'] | selectattr('type', 'equalto', 'image') %}\
{{ '<image>\\n' }}{% endfor %}\
{% for content in message['content'] | selectattr('type', 'equalto', 'text') %}\
{{ content['text'] + ' ' }}{% endfor %}\
{% if message['role'] == 'assistant' %}{{ '</s>' }}{% endif %}\
{% endfor %}{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"""
"""Images first, and nothing of a content that is no list: LLaVA-1.5's own."""

GEMMA_TEMPLATE = """\
{{ bos_token }}\
{%- if messages[0]['role'] == 'system' -%}\
    {%- if messages[0]['content'] is string -%}\
        {%- set prefix = messages[0]['content'] + '\\n\\n' -%}\
    {%- else -%}\
        {%- set prefix = messages[0]['content'][0]['text'] + '\\n\\n' -%}\
    {%- endif -%}\
    {%- set rest = messages[1:] -%}\
{%- else -%}\
    {%- set prefix = '' -%}{%- set rest = messages -%}\
{%- endif -%}\
{%- for message in rest -%}\
    {%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}\
    {{ '<start_of_turn>' + role + '\\n' + (prefix if loop.first else '') }}\
    {%- if message['content'] is string -%}{{ message['content'] | trim }}\
    {%- else -%}\
        {%- for item in message['content'] -%}\
            {%- if item['type'] == 'image' -%}{{ '<start_of_image>' }}\
            {%- elif item['type'] == 'text' -%}{{ item['text'] | trim }}{%- endif -%}\
        {%- endfor -%}\
    {%- endif -%}\
    {{ '<end_of_turn>\\n' }}\
{%- endfor -%}\
{%- if add_generation_prompt -%}{{ '<start_of_turn>model\\n' }}{%- endif -%}"""
"""As Gemma 3's."""
