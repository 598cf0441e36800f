"""Accuracy on held-out seeds, through plain Hugging Face transformers on CPU.

    python -m shapes_vlm.evaluate --model model --out eval.json           # everything
    python -m shapes_vlm.evaluate --model model --per-group 1000 --out eval.json
    python -m shapes_vlm.evaluate --model model --count 20 --only color,ocr

Exact match after lower-casing and dropping surrounding blanks and a final full stop. Tables:
  tasks    per task, at the picture's own resolution
  styled   the same tasks in styles that training never shows (`style.held_out`)
  turns    after 0 to 5 earlier turns about the same image, which the model itself answers
  blind    the same questions with every picture painted grey: what guessing reaches
  tiers    pictures of 224..336 pixels with max_pixels at 1, 1/2 and 1/4 of the picture
  pooling  the projector's output mean-pooled over 1x2 and 2x2 neighbours before the language model;
           a pooled token takes the mean M-RoPE position of its members
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import multiprocessing
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor, DynamicCache

from shapes_vlm import heldout

TRADE_SIDES = (224, 280, 336)
TRADE_TASKS = (
    "color", "shape", "count_all", "count_color", "exist", "where", "rel_what", "extreme", "ocr",
    "cell", "bar_extreme", "bar_value",
)  # fmt: skip
MAX_NEW_TOKENS = 40


class Unit(NamedTuple):
    """One row of one table."""

    table: str
    column: str
    task: str
    count: int
    scale: float = 1.0
    pool: int = 1


class Score(NamedTuple):
    """Hits per question, mean visual tokens, and (question, reference, answer) of the misses."""

    hits: list[bool]
    visual_tokens: float
    misses: list[tuple[str, str, str]]


class Evaluator:
    """A model and its processor."""

    def __init__(self, path: Path, threads: int = 1) -> None:
        torch.set_num_threads(threads)
        self._processor = AutoProcessor.from_pretrained(path)
        self._model = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32).eval()
        self._image_token = self._model.config.image_token_id

    def score(self, items: list[heldout.Item], *, scale: float = 1.0, pool: int = 1) -> Score:
        """Exact match of the last turn; earlier turns are answered by the model itself."""
        hits, num_visual, misses = [], 0, []
        for item in items:
            history: list[tuple[str, str]] = []
            for question, _ in item.turns:
                answer, tokens = self.answer(item, history, question, scale=scale, pool=pool)
                history += [("user", question), ("assistant", answer)]
            reference = item.turns[-1][1]
            hits.append(heldout.normalise(answer) == heldout.normalise(reference))
            num_visual += tokens
            if not hits[-1]:
                misses.append((question, reference, answer))
        return Score(hits, num_visual / len(items), misses)

    @torch.inference_mode()
    def answer(
        self,
        item: heldout.Item,
        history: list[tuple[str, str]],
        question: str,
        *,
        scale: float = 1.0,
        pool: int = 1,
    ) -> tuple[str, int]:
        """The answer and the number of visual tokens it was read from."""
        messages: list[dict[str, Any]] = [
            {"role": role, "content": [{"type": "text", "text": text}]}
            for role, text in [*history, ("user", question)]
        ]
        pictures = [{"type": "image", "image": image} for image in item.images]
        messages[0]["content"] = pictures + messages[0]["content"]
        options = {}
        if item.images and scale != 1.0:
            most = int(item.images[0].width * item.images[0].height * scale)
            size = {"shortest_edge": 56 * 56, "longest_edge": most}
            options = {"processor_kwargs": {"size": size}}
        inputs = self._processor.apply_chat_template(
            messages,
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
            **options,
        )
        num_visual = int((inputs["input_ids"] == self._image_token).sum()) // pool
        if pool == 1:
            output = self._model.generate(**inputs, max_new_tokens=MAX_NEW_TOKENS, do_sample=False)
            tokens = output[0, inputs["input_ids"].shape[1] :]
        else:
            tokens = self._generate_pooled(inputs, pool)
        return self._processor.decode(tokens, skip_special_tokens=True), num_visual

    def _generate_pooled(self, inputs: Any, pool: int) -> list[int]:
        language = self._model.model.language_model
        embeds, positions = self._pooled_prompt(inputs, (2, 2) if pool == 4 else (1, 2))
        cache, tokens, following = DynamicCache(), [], float(positions.max()) + 1
        for _ in range(MAX_NEW_TOKENS):
            hidden = language(
                inputs_embeds=embeds, position_ids=positions, past_key_values=cache, use_cache=True
            ).last_hidden_state
            token = int(self._model.lm_head(hidden[0, -1]).argmax())
            if token == self._model.config.text_config.eos_token_id:
                break
            tokens.append(token)
            embeds = language.embed_tokens(torch.tensor([[token]]))
            positions = torch.full((3, 1, 1), following)
            following += 1
        return tokens

    def _pooled_prompt(
        self, inputs: Any, window: tuple[int, int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Prompt embeddings [1, T, 256] and positions [3, 1, T], visual tokens averaged."""
        inner = self._model.model
        ids = inputs["input_ids"][0]
        positions, _ = inner.get_rope_index(
            inputs["input_ids"],
            mm_token_type_ids=inputs["mm_token_type_ids"],
            image_grid_thw=inputs["image_grid_thw"],
            attention_mask=inputs["attention_mask"],
        )
        positions = positions[:, 0].float()
        words = inner.language_model.embed_tokens(ids)
        grids = (inputs["image_grid_thw"][:, 1:] // 2).tolist()
        visual = inner.visual(inputs["pixel_values"], grid_thw=inputs["image_grid_thw"])
        rows_left, embeds, kept = visual.pooler_output, [], []
        at = 0
        while at < len(ids):
            if ids[at] != self._image_token:
                embeds.append(words[at : at + 1])
                kept.append(positions[:, at : at + 1])
                at += 1
                continue
            rows, columns = grids.pop(0)
            count = rows * columns
            cells = rows_left[:count].view(rows, columns, -1)
            where = positions[:, at : at + count].view(3, rows, columns)
            for j in range(0, rows, window[0]):
                for i in range(0, columns, window[1]):
                    box = (slice(j, j + window[0]), slice(i, i + window[1]))
                    embeds.append(cells[box].flatten(0, 1).mean(0, keepdim=True))
                    kept.append(where[(slice(None), *box)].flatten(1).mean(1, keepdim=True))
            rows_left = rows_left[count:]
            at += count
        return torch.cat(embeds)[None], torch.cat(kept, 1)[:, None]


def _grey(item: heldout.Item) -> heldout.Item:
    grey = tuple(Image.new("RGB", image.size, (128, 128, 128)) for image in item.images)
    return dataclasses.replace(item, images=grey)


_evaluator: Evaluator


def _start(path: Path) -> None:
    global _evaluator  # noqa: PLW0603  one model per process
    _evaluator = Evaluator(path)


def _run(unit: Unit) -> tuple[Unit, Score, list[dict[str, Any]]]:
    trade = unit.table in ("tiers", "pooling")
    sides, seed = (TRADE_SIDES, heldout.SEED + 1) if trade else (heldout.SIDES, heldout.SEED)
    if unit.table == "turns":
        items = heldout.conversation(unit.task, unit.count, int(unit.column))
    else:
        styled = unit.table == "styled"
        items = heldout.build(unit.task, unit.count, sides, seed, styled=styled)
    shown = [_grey(item) for item in items] if unit.table == "blind" else items
    score = _evaluator.score(shown, scale=unit.scale, pool=unit.pool)
    return unit, score, [item.meta for item in items]


def counts(per_group: int, count: int) -> dict[str, int]:
    """Questions per task: `count`, or as many as give each group `per_group`."""
    found = dict.fromkeys(heldout.TASKS, count)
    for members in heldout.GROUPS.values():
        for task in members:
            found[task] = max(count, -(-per_group // len(members)))
    return found


def plan_units(only: list[str], count: int, count_trade: int, per_group: int = 0) -> list[Unit]:
    """All rows of all tables, or the rows of some tasks."""
    of_task = counts(per_group, count)
    pictured = [task for task in only or heldout.TASKS if not task.startswith("text:")]
    units = [Unit("tasks", "1", task, of_task[task]) for task in only or heldout.TASKS]
    units += [Unit("styled", "1", task, of_task[task]) for task in pictured]
    if only:
        return units
    conversed = max(count, -(-per_group // len(heldout.CONVERSED)))
    units += [
        Unit("turns", str(number), task, conversed)
        for task in heldout.CONVERSED
        for number in range(heldout.MAX_EARLIER + 1)
    ]
    units += [Unit("blind", "grey", task, count_trade) for task in pictured]
    for task in TRADE_TASKS:
        for name, scale in {"1": 1.0, "1/2": 0.5, "1/4": 0.25}.items():
            units.append(Unit("tiers", name, task, count_trade, scale=scale))
        units += [Unit("pooling", f"{n}x", task, count_trade, pool=n) for n in (2, 4)]
    return units


def summarise(rows: list[tuple[Unit, Score, list[dict[str, Any]]]]) -> dict[str, Any]:
    """The tables as one JSON object."""
    result: dict[str, Any] = {}
    for unit, score, _ in rows:
        column = result.setdefault(unit.table, {}).setdefault(unit.column, {})
        column[unit.task] = {
            "accuracy": round(sum(score.hits) / len(score.hits), 4),
            "count": len(score.hits),
            "visual_tokens": round(score.visual_tokens, 1),
            "misses": score.misses[:3],
        }
    for columns in result.values():
        for column in columns.values():
            pictured = [row for task, row in column.items() if not task.startswith("text:")]
            if pictured:
                for key in ("accuracy", "visual_tokens"):
                    mean = sum(row[key] for row in pictured) / len(pictured)
                    column[f"mean_{key}"] = round(mean, 4)
    for table, name in (("tasks", "groups"), ("styled", "groups_styled")):
        tasks = result[table]["1"]
        result[name] = {
            group: _group([tasks[task] for task in members])
            for group, members in heldout.GROUPS.items()
            if all(task in tasks for task in members)
        }
    result["ocr"] = _ocr(rows)
    return result


def _group(tasks: list[dict[str, Any]]) -> dict[str, Any]:
    """Accuracy of several tasks together, with Wilson's bounds of 95 %."""
    count = sum(task["count"] for task in tasks)
    hits = sum(round(task["accuracy"] * task["count"]) for task in tasks)
    share, z = hits / count, 1.96
    centre = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z / (1 + z * z / count) * math.sqrt(share * (1 - share) / count + (z / count / 2) ** 2)
    bounds = [round(centre - half, 4), round(centre + half, 4)]
    return {"accuracy": round(share, 4), "bounds": bounds, "count": count}


def _ocr(rows: list[tuple[Unit, Score, list[dict[str, Any]]]]) -> dict[str, Any]:
    """Accuracy of reading by length of the string."""
    pairs = [
        (hit, meta["length"])
        for unit, score, metas in rows
        if unit.table == "tasks" and unit.task.startswith("ocr")
        for hit, meta in zip(score.hits, metas, strict=True)
    ]
    by_length = {n: [hit for hit, length in pairs if length == n] for n in (1, 2, 3, 4)}
    return {
        f"length {n}": {"accuracy": round(sum(hits) / len(hits), 4), "count": len(hits)}
        for n, hits in by_length.items()
        if hits
    }


def main() -> None:
    """Parse the command line, evaluate, print and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=Path("model"))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--count", type=int, default=100, help="questions per task")
    parser.add_argument("--per-group", type=int, default=0, help="questions per group of tasks")
    parser.add_argument("--count-trade", type=int, default=40, help="per task in the other tables")
    parser.add_argument("--only", default="", help="comma-separated tasks; skips the other tables")
    parser.add_argument("--jobs", type=int, default=2, help="processes of one thread each")
    arguments = parser.parse_args()
    begun = time.monotonic()
    only = [task for task in arguments.only.split(",") if task]
    units = plan_units(only, arguments.count, arguments.count_trade, arguments.per_group)
    rows = []
    context = multiprocessing.get_context("spawn")
    with context.Pool(arguments.jobs, _start, (arguments.model,)) as pool:
        for row in pool.imap(_run, units):
            rows.append(row)
            unit, score, _ = row
            accuracy = sum(score.hits) / len(score.hits)
            print(f"{unit.table:8s} {unit.column:4s} {unit.task:16s} {accuracy:.3f}", flush=True)
    result = summarise(rows)
    result["seconds"] = round(time.monotonic() - begun)
    print(
        json.dumps(
            {key: result[key] for key in ("groups", "groups_styled", "ocr", "seconds")}, indent=1
        )
    )
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
