"""`vlm-worker calibrate`: a file that a worker starts with, and one line for what it cannot use."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from worker.checkpoints import SHAPES

from vlm_worker.core.activation_scales import read_scales
from vlm_worker.core.model_files import ModelConfigError
from vlm_worker.serve.calibrate import run_calibrate
from vlm_worker.serve.loading import load
from vlm_worker.settings import CalibrateSettings, WorkerSettings, parse


@pytest.fixture
def images(tmp_path: Path) -> Path:
    folder = tmp_path / "images"
    folder.mkdir()
    rng = np.random.default_rng(0)
    for number, suffix in enumerate(("png", "jpg", "webp")):
        rgb = rng.integers(0, 256, (224, 224 + 28 * number, 3), np.uint8)
        Image.fromarray(rgb).save(folder / f"{number}.{suffix}")
    (folder / "notes.txt").write_text("of no interest")
    return folder


def calibrate(*argv: str | Path, model: Path = SHAPES) -> int:
    settings = parse(["calibrate", str(model), *map(str, argv)], {})
    assert isinstance(settings, CalibrateSettings)
    return run_calibrate(settings)


def test_a_worker_starts_with_the_file_and_tells_its_hash(
    images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, prompts = tmp_path / "scales.json", tmp_path / "prompts.txt"
    prompts.write_text("What colour is it?\n\nHow many are there?\n")
    assert calibrate(images, "--out", out, "--prompts", prompts, "--parts=encoder,merger") == 0
    scales = read_scales(out).scales
    assert (scales.images, list(scales.parts)) == (3, ["encoder", "merger"])
    assert scales.sha256 in capsys.readouterr().out
    assert out.stat().st_mode & 0o777 == 0o644
    worker = parse(
        [
            *("encoder", f"--model={SHAPES}", "--served-name=m", "--bind=127.0.0.1"),
            *("--dtype=bfloat16", "--weights=encoder=int8,merger=int8"),
            *(f"--activation-scales={out}", f"--activation-scales-hash={scales.sha256}"),
        ],
        {},
    )
    assert isinstance(worker, WorkerSettings)
    loaded = load(worker, lambda _: None)
    assert loaded.activation_scales == scales.sha256
    told = f"encoder=int8,merger=int8;activations={scales.sha256[:12]}"
    assert loaded.facts.weights == told


def test_the_same_images_give_the_same_file(images: Path, tmp_path: Path) -> None:
    first, second = tmp_path / "a.json", tmp_path / "b.json"
    files = sorted(path for path in images.iterdir() if path.suffix != ".txt")
    calibrate(images, "--out", first, "--parts=encoder")
    calibrate(*files, "--out", second, "--parts=encoder")
    assert first.read_bytes() == second.read_bytes()


def test_percentile_and_margin_are_in_the_file_and_in_the_scales(
    images: Path, tmp_path: Path
) -> None:
    found = []
    for flags in ([], ["--margin=2"], ["--percentile=99"]):
        calibrate(images, "--out", tmp_path / "scales.json", "--parts=encoder", *flags)
        found.append(read_scales(tmp_path / "scales.json").scales)
    assert [(one.percentile, one.margin) for one in found] == [(99.99, 1), (99.99, 2), (99, 1)]
    for name, layer in found[0].parts["encoder"].items():
        assert found[1].parts["encoder"][name].scale == pytest.approx(2 * layer.scale)
        assert found[2].parts["encoder"][name].scale < layer.scale


def test_images_that_cannot_be_used_are_named_with_a_fix(images: Path, tmp_path: Path) -> None:
    out = tmp_path / "scales.json"
    empty = tmp_path / "empty"
    empty.mkdir()
    damaged = images / "3.png"
    damaged.write_bytes((images / "0.png").read_bytes()[:3000])
    no_image = images / "notes.txt"
    for given, problem in (
        (empty, "empty: has no images; put files there"),
        (tmp_path / "none", "none: no such file"),
        (damaged, r"3\.png: .*(convert it|copy the file again), or remove it"),
        (no_image, r"notes\.txt: .*; convert it, or remove it"),
        (images, r"3\.png: "),
    ):
        with pytest.raises(ModelConfigError, match=problem):
            calibrate(given, "--out", out)
        assert not out.exists()
        assert not list(tmp_path.glob(".scales*")), "nothing is left beside it"


def test_prompts_that_cannot_be_used_are_named(images: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    for write, problem in (
        (lambda: None, "prompts.txt: cannot be read"),
        (lambda: prompts.write_text("\n \n"), "is empty; write one prompt per line"),
        (lambda: prompts.write_bytes(b"\xff\xfe"), "it is not text in UTF-8"),
    ):
        write()
        with pytest.raises(ModelConfigError, match=problem):
            calibrate(images, "--out", tmp_path / "s.json", "--prompts", prompts)


def test_a_file_that_cannot_be_written_ends_the_run_before_the_model_is_read(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vlm_worker.serve.calibrate.calibrate", None)
    for out in (tmp_path / "none" / "s.json", tmp_path):
        with pytest.raises(ModelConfigError, match=r"--out=.*: cannot be written: .*; name a file"):
            calibrate(images, "--out", out)


def test_a_text_only_model_is_refused(images: Path, tmp_path: Path) -> None:
    model = tmp_path / "text"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    shutil.copy(SHAPES / "preprocessor_config.json", model)
    with pytest.raises(ModelConfigError, match="model_type is 'qwen2', which is not served"):
        calibrate(images, "--out", tmp_path / "s.json", model=model)


@pytest.mark.parametrize(
    ("argv", "problem"),
    [
        (["--parts=tower"], "must name some of encoder, merger, layers, head"),
        (["--parts=head,head"], "once"),
        (["--percentile=50"], "a percentage from 50.1 to 100"),
        (["--margin=0"], "a factor from 0.1 to 100"),
    ],
)
def test_flags_out_of_range_are_refused(
    argv: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        parse(["calibrate", "model", "images", "--out=s.json", *argv], {})
    assert problem in capsys.readouterr().err


def test_a_hash_without_a_file_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for sha256, problem in (("a" * 64, "give the file, too"), ("abc", "64 hexadecimal digits")):
        flags = [f"--model={SHAPES}", "--served-name=m", f"--activation-scales-hash={sha256}"]
        with pytest.raises(SystemExit, match="2"):
            parse(["encoder", *flags], {})
        assert problem in capsys.readouterr().err
