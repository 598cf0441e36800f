"""Write a Hugging Face model directory (bf16 safetensors, processor, chat template) from a training checkpoint.

python export.py --ckpt ckpt.pt --out model
"""

import argparse

import torch

import build
import train

if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    ap.add_argument("--ckpt", default="ckpt.pt")
    ap.add_argument("--out", default="model")
    a = ap.parse_args()
    tok = build.make_tokenizer()
    model = build.new_model(tok)
    model.load_state_dict(torch.load(a.ckpt, map_location="cpu")["model"])
    train.export(model, tok, a.out)
