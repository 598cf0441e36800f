"""The model of the comparison: `random_vlm`, with a tokenizer and a chat template.

Qwen2-VL is the architecture that every engine here can run. The tokenizer is a byte-level BPE over
the words of `words.txt`, one token each; the vocabulary is filled up to that of the model.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

import calls  # noqa: E402
import random_vlm  # noqa: E402

START, END, PAD = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
VISION = {
    random_vlm.VISION_START: "<|vision_start|>",
    random_vlm.VISION_END: "<|vision_end|>",
    random_vlm.IMAGE_TOKEN: "<|image_pad|>",
    random_vlm.VIDEO_TOKEN: "<|video_pad|>",
}
IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] in ('image', 'image_url') %}" + IMAGE + "{% else %}{{ part['text'] }}"
    "{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def make(directory: Path) -> Path:
    """Write weights, processors, tokenizer and template, unless they are there."""
    if not (directory / "tokenizer_config.json").exists():
        directory.mkdir(parents=True, exist_ok=True)
        random_vlm.make_model(directory)
        _spell_out_processor(directory)
        _make_tokenizer(directory)
    return directory


def _spell_out_processor(directory: Path) -> None:
    """Say what only transformers takes for granted: CLIP's mean and deviation, sizes."""
    path = directory / "preprocessor_config.json"
    config = json.loads(path.read_text())
    config |= {
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711],
        "min_pixels": config["size"]["shortest_edge"],
        "max_pixels": config["size"]["longest_edge"],
    }
    path.write_text(json.dumps(config, indent=1))


def _make_tokenizer(directory: Path) -> None:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=random_vlm.VISION_START,
        special_tokens=[PAD, START, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    words = calls.WORDS.read_text().split()
    tokenizer.train_from_iterator([f"{word} {word}" for word in words], trainer)
    written = json.loads(tokenizer.to_str())
    vocabulary = written["model"]["vocab"]
    names = {index: f"<|unused_{index}|>" for index in range(random_vlm.Size().vocabulary)}
    for index in range(len(vocabulary), random_vlm.Size().vocabulary):
        vocabulary[VISION.get(index, names[index])] = index
    whole = Tokenizer.from_str(json.dumps(written))
    whole.add_special_tokens(list(VISION.values()))
    whole.save(str(directory / "tokenizer.json"))
    special = [PAD, START, END, *VISION.values()]
    config = {
        "tokenizer_class": "Qwen2TokenizerFast",
        "processor_class": "Qwen2VLProcessor",
        "eos_token": END,
        "pad_token": PAD,
        "additional_special_tokens": special[1:],
        "chat_template": TEMPLATE,
        "model_max_length": 8192,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=1))
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    (directory / "processor_config.json").write_text('{"processor_class": "Qwen2VLProcessor"}')


if __name__ == "__main__":
    make(Path(sys.argv[1]))
