"""The model for llama.cpp: text and image projector as GGUF, by llama.cpp's own converter.

    python to_gguf.py LLAMA_CPP_SOURCE MODEL_DIR TARGET_DIR

The converter knows tokenizers by a hash of what they make of a text, and looks for SentencePiece
first. That of `peer_model.py` splits as Qwen2's does, so it is told that it is Qwen2's.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path


def main() -> None:
    """Convert twice: `text.gguf`, `mmproj.gguf`."""
    source, model_dir, target = map(Path, sys.argv[1:4])
    sys.path[:0] = [str(source), str(source / "gguf-py")]
    from conversion import base  # of llama.cpp

    base.TextModel.get_vocab_base_pre = lambda _self, _tokenizer: "qwen2"
    base.TextModel._set_vocab_sentencepiece = base.TextModel._set_vocab_gpt2
    script = str(source / "convert_hf_to_gguf.py")
    for name, flags in (("text", []), ("mmproj", ["--mmproj"])):
        out = str(target / f"{name}.gguf")
        sys.argv = [script, str(model_dir), "--outtype", "bf16", "--outfile", out, *flags]
        runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
