"""Questions about text, grids and bar charts, each with its answer; None where it has none."""

from __future__ import annotations

from shapes_vlm.wording import color_word, pick


def ocr(sc, rng):
    """What the only text says."""
    if len(sc["texts"]) != 1:
        return None
    return pick(
        rng, "What does the text say?", "Read the text.", "What is written in the image?"
    ), sc["texts"][0]["s"]


def ocr_line(sc, rng):
    """What one of two texts says."""
    if len(sc["texts"]) != 2:
        return None
    i = rng.randint(0, 1)
    w = ["top", "bottom"][i]
    return pick(
        rng, f"What is written at the {w}?", f"Read the {w} text.", f"What does the {w} line say?"
    ), sc["texts"][i]["s"]


def text_color(sc, rng):
    """The colour of the only text."""
    if len(sc["texts"]) != 1:
        return None
    return pick(
        rng, f"What {color_word(rng)} is the text?", f"What is the text {color_word(rng)}?"
    ), sc["texts"][0]["color"]


def char_count(sc, rng):
    """How long the only text is."""
    if len(sc["texts"]) != 1:
        return None
    return pick(rng, "How many characters are written?", "How long is the text?"), str(
        len(sc["texts"][0]["s"])
    )


def cell(sc, rng):
    """What a cell of a grid holds."""
    j, i = rng.randint(1, sc["rows"]), rng.randint(1, sc["cols"])
    return pick(rng, f"What is in row {j}, column {i}?", f"What is in column {i} of row {j}?"), sc[
        "cells"
    ].get((j, i), "empty")


def grid_size(sc, rng):
    """How many rows or columns a grid has."""
    w = rng.choice(["row", "column"])
    return f"How many {w}s does the grid have?", str(sc["rows"] if w == "row" else sc["cols"])


def bar_extreme(sc, rng):
    """Which bar is the highest, or the lowest."""
    hi = rng.random() < 0.5
    os_ = sorted(sc["objs"], key=lambda o: -o["value"] if hi else o["value"])
    if os_[0]["value"] == os_[1]["value"]:
        return None
    w = pick(rng, "tallest", "highest") if hi else pick(rng, "shortest", "lowest")
    return pick(rng, f"Which bar is the {w}?", f"What {color_word(rng)} is the {w} bar?"), os_[0][
        "color"
    ]


def bar_value(sc, rng):
    """How high a bar is."""
    o = rng.choice(sc["objs"])
    return pick(
        rng, f"What is the value of the {o['color']} bar?", f"How high is the {o['color']} bar?"
    ), str(o["value"])


def bar_count(sc, rng):
    """How many bars there are."""
    return pick(rng, "How many bars are there?", "Count the bars."), str(len(sc["objs"]))
