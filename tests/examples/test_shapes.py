"""The model that ships: repeatable data, and a training forward equal to the modules' own."""

import random

import numpy as np
import pytest
import torch
from PIL import Image
from shapes_vlm import batches, build, drawing, heldout, scenes
from shapes_vlm.forward import vision_forward
from shapes_vlm.losses import answer_loss
from shapes_vlm.train import export
from torch.nn import functional
from transformers import AutoProcessor


@pytest.mark.parametrize("task", ["color", "ocr", "compare_count", "multi_turn", "text:spell"])
def test_a_heldout_question_is_a_function_of_its_seed(task):
    first, second = (heldout.build(task, 3) for _ in range(2))
    assert [item.turns for item in first] == [item.turns for item in second]
    for a, b in zip(first, second, strict=True):
        assert [i.tobytes() for i in a.images] == [i.tobytes() for i in b.images]


def test_every_task_has_questions():
    for task in heldout.TASKS:
        (item,) = heldout.build(task, 1)
        assert item.turns, task
        assert bool(item.images) != task.startswith("text:"), task


def test_dense_labels_mark_each_object_at_its_centre():
    scene = scenes.scene_shapes(random.Random(3), 168, 168)
    labels = scenes.dense_labels(scene)
    for o in scene["objs"]:
        row, column = int(o["cy"] // drawing.PATCH), int(o["cx"] // drawing.PATCH)
        assert labels[row, column, 0] == drawing.COLOR_NAMES.index(o["color"]) + 1
        assert labels[row, column, 2] == 1


@pytest.fixture(scope="module")
def untrained(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    tokenizer = build.make_tokenizer()
    torch.manual_seed(0)
    model = build.new_model(tokenizer).eval()
    export(model, tokenizer, path)
    return model, tokenizer, path


@pytest.mark.parametrize(
    ("width", "height", "num_images"), [(112, 112, 1), (168, 140, 1), (224, 224, 1), (252, 112, 2)]
)
@torch.no_grad()
def test_the_training_forward_equals_the_modules_forward(untrained, width, height, num_images):
    model, tokenizer, path = untrained
    rng = random.Random(0)
    pixels = [
        drawing.render(scenes.scene_shapes(rng, width, height), rng) for _ in range(num_images)
    ]
    inputs = AutoProcessor.from_pretrained(path).apply_chat_template(
        _conversation(pixels), tokenize=True, return_dict=True, return_tensors="pt"
    )
    prompts = batches.Prompts(tokenizer)
    prefix, positions, start = prompts.prefix([(height // 28, width // 28)] * num_images)
    ids, labels = branch = prompts.branch([("What is it?", "a red ring")])
    assert inputs["input_ids"][0].tolist()[: len(prefix) + len(ids)] == [*prefix, *ids]

    visual = vision_forward(model.model.visual, torch.from_numpy(np.stack(pixels)))
    reference = model.model.visual(inputs["pixel_values"], grid_thw=inputs["image_grid_thw"])
    torch.testing.assert_close(visual.flatten(0, 1), reference.pooler_output, atol=1e-4, rtol=1e-4)

    questions = batches._pack(prompts, [[branch]], prefix, positions, start)
    questions.weights = (questions.labels != batches.NO_LOSS).astype(np.float32)
    loss = answer_loss(model, visual, questions, None).loss
    at = torch.arange(len(prefix) - 1, len(prefix) - 1 + len(ids))
    selected = torch.tensor(labels) != batches.NO_LOSS
    logits = model(**inputs).logits[0][at][selected]
    expected = functional.cross_entropy(logits, torch.tensor(labels)[selected])
    torch.testing.assert_close(loss, expected, atol=1e-3, rtol=1e-3)


def _conversation(pixels):
    images = [{"type": "image", "image": Image.fromarray(p)} for p in pixels]
    question = [*images, {"type": "text", "text": "What is it?"}]
    return [
        {"role": "user", "content": question},
        {"role": "assistant", "content": "a red ring"},
    ]
