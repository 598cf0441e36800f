"""Tokenizer, configuration and processor of the tiny VLM (Qwen2.5-VL family).

`build(dir)` writes everything but the weights; `new_model()` returns an untrained
Qwen2_5_VLForConditionalGeneration with the configuration below.
"""

import json
import os
import random
import re

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
)

import data

SPECIAL = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
]
VOCAB = 768
MIN_PIXELS, MAX_PIXELS = 56 * 56, 448 * 448

# ChatML as in Qwen2.5-VL, but without a default system prompt.
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "<|im_start|>{{ message['role'] }}\n"
    "{%- if message['content'] is string -%}{{ message['content'] }}"
    "{%- else -%}{%- for item in message['content'] -%}"
    "{%- if item['type'] in ('image', 'image_url') or 'image' in item or 'image_url' in item -%}"
    "<|vision_start|><|image_pad|><|vision_end|>"
    "{%- elif 'text' in item -%}{{ item['text'] }}{%- endif -%}"
    "{%- endfor -%}{%- endif -%}<|im_end|>\n"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|im_start|>assistant\n{%- endif -%}"
)
# Jinja's trim would eat the newlines after the role and after <|im_end|>, so they are written as expressions.
CHAT_TEMPLATE = CHAT_TEMPLATE.replace("\n", "{{ '\\n' }}")


def corpus(seed=7, n=5000):
    """Training text for the tokenizer: questions, answers and chat lines, with the OCR strings removed so that
    upper-case strings always split into single characters."""
    rng = random.Random(seed)
    drop = re.compile(r"\b[A-Z0-9]+\b")
    for i in range(n):
        sc = data.make_scene(rng, 168, 168)
        convs = data.questions(sc, rng, 6)
        convs += data.two_image_questions(
            data.scene_shapes(rng, 168, 168), data.scene_shapes(rng, 168, 168), rng, 1
        )
        if i % 2:
            convs.append(data.text_only(rng))
        for task, turns in convs:
            for q, a in turns:
                if task in ("spell", "repeat"):
                    q, a = "Spell the word . Repeat . Say .", ""
                for t in (q, "user", "assistant", "system") + (() if "ocr" in task else (a,)):
                    yield t if task == "chat" or t == data.NO_IMAGE else drop.sub("", t)


TOKENIZER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "tokenizer.json")


def make_tokenizer():
    """The stored tokenizer.json; trained (and stored) when there is none.  It is kept as a file because any change
    to the generator changes the corpus, and a re-trained tokenizer would no longer fit an older checkpoint."""
    t = Tokenizer.from_file(TOKENIZER) if os.path.exists(TOKENIZER) else train_tokenizer()
    return PreTrainedTokenizerFast(
        tokenizer_object=t,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        model_max_length=4096,
        clean_up_tokenization_spaces=False,
        extra_special_tokens={"image_token": "<|image_pad|>", "video_token": "<|video_pad|>"},
    )


def train_tokenizer():
    t = Tokenizer(models.BPE())
    t.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    t.decoder = decoders.ByteLevel()
    t.train_from_iterator(
        corpus(),
        trainers.BpeTrainer(
            vocab_size=VOCAB,
            min_frequency=2,
            special_tokens=SPECIAL,
            show_progress=False,
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        ),
    )
    t.save(TOKENIZER)
    return t


def make_config(tok):
    i = tok.convert_tokens_to_ids
    n = (len(tok) + 63) // 64 * 64
    return Qwen2_5_VLConfig(
        text_config=dict(
            vocab_size=n,
            hidden_size=256,
            intermediate_size=384,
            num_hidden_layers=5,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=4096,
            rms_norm_eps=1e-6,
            tie_word_embeddings=True,
            rope_parameters=dict(rope_type="default", rope_theta=40.0, mrope_section=[4, 14, 14]),
            bos_token_id=i("<|endoftext|>"),
            eos_token_id=i("<|im_end|>"),
            pad_token_id=i("<|endoftext|>"),
        ),
        vision_config=dict(
            depth=4,
            hidden_size=128,
            intermediate_size=256,
            num_heads=2,
            out_hidden_size=256,
            patch_size=14,
            spatial_merge_size=2,
            temporal_patch_size=2,
            window_size=112,
            fullatt_block_indexes=[1, 3],
        ),
        image_token_id=i("<|image_pad|>"),
        video_token_id=i("<|video_pad|>"),
        vision_start_token_id=i("<|vision_start|>"),
        vision_end_token_id=i("<|vision_end|>"),
        tie_word_embeddings=True,
    )


def new_model(tok):
    return Qwen2_5_VLForConditionalGeneration(make_config(tok))


def save_processor(path, tok):
    """Qwen2_5_VLProcessor needs a video processor and so torchvision; PaddleOCRVLProcessor does the same work for
    images (one placeholder per merged patch, `mm_token_type_ids`) without it, so AutoProcessor is pointed there."""
    os.makedirs(path, exist_ok=True)
    tok.chat_template = CHAT_TEMPLATE
    tok.save_pretrained(path)
    img = dict(
        image_processor_type="Qwen2VLImageProcessor",
        do_convert_rgb=True,
        do_resize=True,
        do_rescale=True,
        do_normalize=True,
        rescale_factor=1 / 255,
        resample=3,
        image_mean=[0.5, 0.5, 0.5],
        image_std=[0.5, 0.5, 0.5],
        patch_size=14,
        merge_size=2,
        temporal_patch_size=2,
        size=dict(shortest_edge=MIN_PIXELS, longest_edge=MAX_PIXELS),
    )
    for name, d in (
        ("preprocessor_config.json", dict(img, processor_class="PaddleOCRVLProcessor")),
        (
            "processor_config.json",
            dict(processor_class="PaddleOCRVLProcessor", image_processor=img),
        ),
    ):
        with open(os.path.join(path, name), "w") as f:
            json.dump(d, f, indent=2)
            f.write("\n")


if __name__ == "__main__":
    tok = make_tokenizer()
    save_processor("model", tok)
    m = new_model(tok)
    n = {
        k: sum(p.numel() for p in x.parameters())
        for k, x in dict(vision=m.model.visual, language=m.model.language_model, all=m).items()
    }
    print("vocabulary", len(tok), "parameters", n)
    for s in [
        "What is to the left of the red circle?",
        "K7F2",
        "CAT",
        "Is there an orange star?",
        "<|im_start|>user\nCount the crosses.<|im_end|>\n<|im_start|>assistant\n3<|im_end|>",
    ]:
        print(tok.tokenize(s))
