"""Train shapes on CPU from freshly drawn data.

    python -m shapes_vlm.train --minutes 240 --phase-a 0.25 --out model
    python -m shapes_vlm.train --minutes 0 --steps 2000        # repeatable for a given --seed
    python -m shapes_vlm.train --resume model ...              # go on from exported weights

Two phases: (A) the vision tower alone learns what each patch shows, from cluttered scenes; (B)
vision tower and language model learn to answer, the patch loss and the position loss kept as
auxiliaries. The auxiliary heads are dropped on export.
"""

from __future__ import annotations

import argparse
import copy
import multiprocessing
import random
import time
from pathlib import Path
from queue import Full
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast, Qwen2_5_VLForConditionalGeneration

from shapes_vlm import batches, build, drawing
from shapes_vlm.forward import vision_forward
from shapes_vlm.losses import AUX_SIZES, NUM_CELLS, answer_loss, patch_loss
from shapes_vlm.muon import Muon
from shapes_vlm.style import Trained, fonts_in

CHECKPOINT_SECONDS = 120


class Trainer:
    """Model, auxiliary heads and both optimisers."""

    def __init__(self, arguments: argparse.Namespace, tokenizer: PreTrainedTokenizerFast) -> None:
        self.arguments = arguments
        self.model = _initial_model(arguments, tokenizer)
        self.patch_head = nn.Linear(256, 4 * sum(AUX_SIZES))
        self.position_head = nn.Linear(256, 2 * NUM_CELLS)
        named = list(self.model.named_parameters())
        matrices = [(n, p) for n, p in named if p.ndim == 2 and "embed_tokens" not in n]
        chosen = {id(p) for _, p in matrices}
        self._vision_muon = Muon((n, p) for n, p in matrices if ".visual." in n)
        self._language_muon = Muon((n, p) for n, p in matrices if ".visual." not in n)
        heads = [*self.patch_head.parameters(), *self.position_head.parameters()]
        rest = [p for _, p in named if id(p) not in chosen]
        self._adam = torch.optim.AdamW([*rest, *heads], betas=(0.9, 0.98), weight_decay=0.01)
        self._parameters = [p for _, p in named] + heads

    def step(self, batch: batches.Batch, lr: float) -> dict[str, float]:
        """One optimiser step; returns what is worth printing."""
        for p in self._parameters:
            p.grad = torch.zeros_like(p)
        loss, record = self._loss(batch)
        loss.backward()
        nn.utils.clip_grad_norm_(self._parameters, 1.0)
        answering = batch.questions is not None
        if not answering:
            for p in self.model.model.language_model.parameters():
                p.grad.zero_()
        self._vision_muon.step(lr)
        if answering:
            self._language_muon.step(lr)
        for group in self._adam.param_groups:
            group["lr"] = lr * 0.6
        self._adam.step()
        return record

    def _loss(self, batch: batches.Batch) -> tuple[Tensor, dict[str, float]]:
        cells, patch, accuracies = self._patch_loss(batch.pictures)
        names = ("color", "shape", "center", "char")
        record = {"patch": patch.item(), **dict(zip(names, accuracies, strict=True))}
        if batch.questions is None:
            return patch, record
        assert batch.clutter is not None, "phase B batches carry clutter"
        answers = answer_loss(self.model, cells, batch.questions, self.position_head)
        _, clutter, _ = self._patch_loss(batch.clutter)
        auxiliary = patch + clutter + answers.position_loss
        loss = answers.loss + self.arguments.auxiliary * auxiliary
        record |= {
            "answer": answers.loss.item(),
            "token": answers.accuracy,
            "where": answers.position_accuracy,
        }
        if batch.text is not None:
            loss = loss + 0.3 * answer_loss(self.model, None, batch.text, None).loss
        return loss, record

    def _patch_loss(self, pictures: batches.Pictures) -> tuple[Tensor, Tensor, list[float]]:
        cells = vision_forward(self.model.model.visual, torch.from_numpy(pictures.pixels))
        return cells, *patch_loss(self.patch_head, cells, pictures.labels)


def _initial_model(
    arguments: argparse.Namespace, tokenizer: PreTrainedTokenizerFast
) -> Qwen2_5_VLForConditionalGeneration:
    if arguments.resume:
        return Qwen2_5_VLForConditionalGeneration.from_pretrained(
            arguments.resume, dtype=torch.float32
        )
    model = build.new_model(tokenizer)
    for layer in model.model.language_model.layers:  # smaller residual branches at the start
        layer.self_attn.o_proj.weight.data *= 0.3
        layer.mlp.down_proj.weight.data *= 0.3
    return model


def export(model: nn.Module, tokenizer: PreTrainedTokenizerFast, path: Path) -> None:
    """Write a Hugging Face model directory in bfloat16."""
    build.save_processor(path, tokenizer)
    exported = copy.deepcopy(model).to(torch.bfloat16)
    generation, text = exported.generation_config, exported.config.text_config
    generation.do_sample, generation.max_new_tokens = False, 48
    generation.eos_token_id, generation.pad_token_id = text.eos_token_id, text.pad_token_id
    generation.bos_token_id = None
    exported.save_pretrained(path)


def draw_forever(queue: Any, state: Any, arguments: argparse.Namespace) -> None:
    """The drawing process: batches for the phase and progress that `state` holds."""
    torch.set_num_threads(1)
    prompts = batches.Prompts(build.make_tokenizer())
    rng = random.Random(arguments.seed * 1000 + 17)
    fonts = fonts_in(arguments.fonts, drawing.CHARS) if arguments.fonts else []
    styles = Trained(tuple(fonts), arguments.share_plain)
    mix = batches.Mix(styles, arguments.share_conversations)
    number = 0
    parent = multiprocessing.parent_process()
    while True:
        answering, progress = bool(state[0]), state[1]
        if answering:
            batch = batches.draw(prompts, rng, progress, arguments.cells, mix)
            batch.clutter = batches.clutter_pictures(rng, arguments.clutter, mix)
            if number % 4 == 0:
                batch.text = batches.draw_text(prompts, rng)
        else:
            batch = batches.draw_clutter(rng, progress, arguments.cells, mix)
        number += 1
        while not _put(queue, batch):
            if parent is not None and not parent.is_alive():
                return


def _put(queue: Any, batch: batches.Batch) -> bool:
    """Queue a batch; False if the queue stays full for a while."""
    try:
        queue.put(batch, timeout=10)
    except Full:
        return False
    return True


def train(arguments: argparse.Namespace) -> None:
    """The whole run; writes the model every two minutes and at the end."""
    torch.manual_seed(arguments.seed)
    torch.set_num_threads(arguments.threads)
    tokenizer = build.make_tokenizer()
    trainer = Trainer(arguments, tokenizer)
    context = multiprocessing.get_context("spawn")
    queue, state = context.Queue(6), context.Array("d", [0.0, 0.0])
    drawing = context.Process(target=draw_forever, args=(queue, state, arguments), daemon=True)
    drawing.start()
    begun = saved = time.monotonic()
    average: dict[str, float] = {}
    step = 0
    while (progress := _progress(arguments, step, time.monotonic() - begun)) < 1:
        answering = progress >= arguments.phase_a
        within = (progress - arguments.phase_a) / (1 - arguments.phase_a)
        within = arguments.begin + (1 - arguments.begin) * within
        state[0], state[1] = answering, within if answering else progress / arguments.phase_a
        batch = queue.get()
        if answering and batch.questions is None:
            continue  # left over from phase A
        warm_up, decay = min(1.0, (step + 1) / 30), min(1.0, (1 - progress) / arguments.decay)
        record = trainer.step(batch, arguments.lr * warm_up * decay)
        step += 1
        for key, value in record.items():
            if value == value:  # NaN where no patch shows anything
                average[key] = 0.95 * average.get(key, value) + 0.05 * value
        if step % 25 == 0:
            figures = " ".join(f"{key} {value:.3f}" for key, value in average.items())
            minutes = (time.monotonic() - begun) / 60
            print(
                f"{'B' if answering else 'A'} step {step} {minutes:.1f} min {figures}", flush=True
            )
        if time.monotonic() - saved > CHECKPOINT_SECONDS:
            saved = time.monotonic()
            export(trainer.model, tokenizer, arguments.out)
    export(trainer.model, tokenizer, arguments.out)
    drawing.terminate()
    drawing.join()


def _progress(arguments: argparse.Namespace, step: int, seconds: float) -> float:
    return seconds / 60 / arguments.minutes if arguments.minutes else step / arguments.steps


def main() -> None:
    """Parse the command line and train."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--out", type=Path, default=Path("model"))
    add("--resume", default="", help="a model directory to go on from")
    add("--minutes", type=float, default=45, help="time budget; 0: use --steps")
    add("--steps", type=int, default=2000)
    add("--phase-a", type=float, default=0.16, help="share of the budget for the vision tower")
    add("--cells", type=int, default=1152, help="visual tokens per batch")
    add("--lr", type=float, default=3e-3)
    add("--decay", type=float, default=0.4, help="last share of the budget: linear decay to zero")
    add("--auxiliary", type=float, default=0.3, help="weight of patch and position losses")
    add("--clutter", type=int, default=20, help="cluttered pictures per step in phase B")
    add("--fonts", type=Path, help="a folder with font files; without it Pillow's font alone")
    add("--share-plain", type=float, default=0.3, help="share of scenes in the plain style")
    add("--share-conversations", type=float, default=0.3, help="of images with 2 to 6 turns")
    add("--begin", type=float, default=0.0, help="progress of the curriculum at the start, 0 to 1")
    add("--threads", type=int, default=2)
    add("--seed", type=int, default=0)
    train(parser.parse_args())


if __name__ == "__main__":
    main()
