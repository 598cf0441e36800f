"""Loads the halves of a model that the stages need, with transformers' modelling module.

    stages          built on the meta device          read from the files
    encoder         vision tower   [UnloadedModule]           vision tower
    prefill,decode  [UnloadedModule]       language model     language model, head
    all             vision tower   language model     everything

The other half is replaced while it is on the meta device, so its tensors are never read.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import importlib
import importlib.machinery
import logging
import sys
import threading
import time
import types
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vlm_kernels import gpu
from vlm_kernels.cpu import native
from vlm_worker.core.activation_scales import ScaleFile, processor_hash, read_scales
from vlm_worker.core.families import Family, FamilySpec
from vlm_worker.core.image_geometry import DynamicProcessor
from vlm_worker.core.model_files import ModelConfigError
from vlm_worker.core.probe import Verification
from vlm_worker.model.attention import use_paged_attention
from vlm_worker.model.checkpoint import Checkpoint, open_checkpoint
from vlm_worker.model.generic import GenericModel, children_of, model_class_of
from vlm_worker.model.gpu.layers import use_gpu_kernels
from vlm_worker.model.layers import DecoderLayer, gated_mlp, mlp_of, norm_of
from vlm_worker.model.linear import Packing, can_pack, pack_linears
from vlm_worker.model.memory import DTYPES
from vlm_worker.model.rounding import pack
from vlm_worker.model.vision_blocks import VisionBlock, join_vision_blocks, use_patch_projection
from vlm_worker.types import Stage
from vlm_worker.weights import AUTO, canonical

logger = logging.getLogger(__name__)

StartProgress = Callable[[str, int, int], None]
"""Called with a step of the start, and how much of it is done of how much; 0 and 0 if unknown."""


def no_progress(_step: str, _done: int = 0, _total: int = 0) -> None:
    """Ignore the progress of a start."""


@dataclasses.dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model, or half of one, ready to run.

    Attributes:
        stages: the loaded stages.
        weights_bytes: bytes of the weights; shared weights count once, copies do not count.
        activation_scales: sha256 of the scales of int8 layers' inputs; empty without a file.
        import_seconds: time to import the modelling module.
        load_seconds: time to read, move and pack the weights.
        generic: the language model of an unlisted family; None without one.
        verification: what the start has shown of an unlisted family.
    """

    model: Any
    checkpoint: Checkpoint
    stages: frozenset[Stage]
    dtype: torch.dtype
    device: torch.device
    weights_bytes: int
    packing: Packing
    import_seconds: float
    load_seconds: float
    activation_scales: str = ""
    generic: GenericModel | None = None
    verification: Verification | None = None

    @property
    def family(self) -> Family:
        return self.checkpoint.family

    @property
    def has_encoder(self) -> bool:
        return Stage.ENCODER in self.stages

    @property
    def has_lm(self) -> bool:
        return bool(self.stages & {Stage.PREFILL, Stage.DECODE})


class UnloadedModule(nn.Module):
    """Replaces a part of the model that is not loaded; a call of it is a bug."""

    def __init__(self, name: str, config: Any = None) -> None:
        super().__init__()
        self.name, self.config = name, config

    def forward(self, *_args: Any, **_kwargs: Any) -> None:
        raise AssertionError(f"{self.name} is not loaded in these stages")


def load_model(
    model_dir: str | Path,
    stages: Collection[Stage],
    *,
    dtype: str = "auto",
    device: str = "auto",
    packed_weights: bool = True,
    weights: str = "auto",
    activation_scales: Path | None = None,
    activation_scales_hash: str = "",
    progress: StartProgress = no_progress,
) -> LoadedModel:
    """Load the parts of a model that `stages` need.

    Args:
        model_dir: a directory in transformers' layout, safetensors.
        stages: at least one.
        dtype: `auto` (the checkpoint's own), `float32`, `bfloat16` or `float16`.
        device: `auto` (a GPU if there is one), `cpu` or `cuda[:N]`.
        packed_weights: pack linear layers if device and dtype benefit (`linear`).
        weights: `int8`, and on a GPU `int4`, rounds the linear layers in `FamilySpec.int8`; or
            types by part (`vlm_worker.weights`).
        activation_scales: file of `vlm-worker calibrate` for the inputs of int8 layers.
        activation_scales_hash: that the file must have; empty for any.
        progress: called for each tensor or layer.

    Raises:
        ModelConfigError: the directory cannot be served; the message names path and fix.
    """
    assert stages
    checkpoint = open_checkpoint(model_dir)
    if not checkpoint.family.spec.is_listed:
        _check_unlisted(checkpoint, weights, activation_scales)
    target = _choose_device(device)
    chosen = _choose_dtype(checkpoint, dtype, target)
    scales = _scales_of(checkpoint, activation_scales, activation_scales_hash)
    began = time.perf_counter()
    loaded_stages, spec = frozenset(stages), checkpoint.family.spec
    with skip_unused_imports():
        whole_class = _class_of(checkpoint)
        imported = time.perf_counter()
        model_class = _pruned_class(whole_class, spec, loaded_stages)
        with _reported(progress):
            model = _read_weights(checkpoint, model_class, chosen)
    packed_vision = isinstance(checkpoint.family.processor, DynamicProcessor)
    use_paged_attention(model, packed_vision=packed_vision if spec.is_listed else None)
    if spec.is_listed:
        use_patch_projection(model)
        use_kernels(model)
    model = _moved(model.eval().requires_grad_(False), target, progress)
    if spec.is_listed and gpu.serves(target):
        use_gpu_kernels(model)
    weights_bytes = sum(parameter.nbytes for parameter in set(model.parameters()))
    packing = Packing()
    report = functools.partial(progress, "packing weights")
    if not spec.is_listed and packed_weights and can_pack(chosen, target):
        packing = pack_linears(model, progress=report)
    if spec.is_listed:
        packing = pack(
            model, spec, report, packed_weights=packed_weights, weights=weights, scales=scales
        )
        join_vision_blocks(model)
    loaded = LoadedModel(
        model=model,
        checkpoint=checkpoint,
        stages=loaded_stages,
        dtype=chosen,
        device=target,
        weights_bytes=weights_bytes - packing.saved_bytes,
        packing=packing,
        import_seconds=imported - began,
        load_seconds=time.perf_counter() - imported,
        activation_scales="" if scales is None else scales.scales.sha256,
    )
    if not spec.is_listed and loaded.has_lm:
        generic = GenericModel(model, checkpoint.family)
        loaded = dataclasses.replace(loaded, generic=generic)
    _log(loaded)
    return loaded


def _check_unlisted(checkpoint: Checkpoint, weights: str, scales: Path | None) -> None:
    """Raise ModelConfigError for settings that only listed families have."""
    for name, value in (("weights", canonical(weights)), ("activation-scales", scales)):
        if value not in (AUTO, None):
            raise ModelConfigError(
                f"--{name}={value}: {checkpoint.family.model_type} is of an unlisted family, which "
                f"is computed as it is; leave the flag out"
            )


def _scales_of(checkpoint: Checkpoint, path: Path | None, sha256: str) -> ScaleFile | None:
    """The scales of a file; None without one. Raises ModelConfigError if they do not fit."""
    if path is None:
        return None
    found = read_scales(path, sha256=sha256)
    processor = processor_hash(checkpoint.family.processor)
    found.check_model(model=checkpoint.revision(), processor=processor)
    return found


def _choose_device(device: str) -> torch.device:
    has_gpu = torch.cuda.is_available()
    if device == "auto":
        return torch.device("cuda" if has_gpu else "cpu")
    kind, _, number = device.partition(":")
    if kind not in {"cpu", "cuda"} or (number and not number.isdigit()):
        raise ModelConfigError(f"--device={device}: must be auto, cpu or cuda[:N]")
    if kind == "cuda" and (not has_gpu or int(number or 0) >= torch.cuda.device_count()):
        raise ModelConfigError(
            f"--device={device}: torch finds {torch.cuda.device_count()} CUDA devices here; "
            "give the pod a GPU, or choose --device=cpu"
        )
    return torch.device(device)


def _choose_dtype(checkpoint: Checkpoint, dtype: str, device: torch.device) -> torch.dtype:
    name = checkpoint.dtype if dtype == "auto" else dtype
    if name not in DTYPES:
        raise ModelConfigError(f"--dtype={dtype}: must be auto, {', '.join(DTYPES)}")
    if name == "float16" and device.type == "cpu":
        raise ModelConfigError(
            f"{checkpoint.path}: float16 is not served on CPUs; choose --dtype=bfloat16 or float32"
        )
    return DTYPES[name]


def _class_of(checkpoint: Checkpoint) -> Any:
    """Transformers' class of a checkpoint."""
    spec = checkpoint.family.spec
    if spec.is_listed:
        return getattr(importlib.import_module(spec.module), spec.model_class)
    return model_class_of(checkpoint.config, str(checkpoint.path / "config.json"))


def _pruned_class(model_class: Any, spec: FamilySpec, stages: frozenset[Stage]) -> Any:
    """A subclass of the family's class that does not build the parts that no stage needs.

    It keeps name and module: transformers uses them to find how it renames a checkpoint's tensors.
    """
    needs_lm = bool(stages & {Stage.PREFILL, Stage.DECODE})

    def build(self: Any, config: Any) -> None:
        model_class.__init__(self, config)
        if not needs_lm:
            self._tied_weights_keys = {}
            self.all_tied_weights_keys = {}
        for parent, name, part, is_lm in list(_parts(self, spec)):
            if not (needs_lm if is_lm else Stage.ENCODER in stages):
                setattr(parent, name, UnloadedModule(name, getattr(part, "config", None)))

    identity = {"__module__": model_class.__module__, "__qualname__": model_class.__qualname__}
    return type(model_class.__name__, (model_class,), {"__init__": build, **identity})


def _parts(model: Any, spec: FamilySpec) -> Iterator[tuple[Any, str, Any, bool]]:
    """Parent, name, module and whether it belongs to the language model, of a model's parts."""
    if not spec.is_listed:
        yield from children_of(model)
        return
    yield model, spec.head, getattr(model, spec.head), True
    for names, is_lm in ((spec.encoder_children, False), (spec.lm_children, True)):
        for name in names:
            yield model.model, name, getattr(model.model, name), is_lm


def _moved(model: Any, target: torch.device, progress: StartProgress) -> Any:
    """Move a model to its device, one module after another; this reads weights that are mapped."""
    if target.type != "cpu":
        done, total = 0, sum(parameter.nbytes for parameter in set(model.parameters()))
        for module in model.modules():
            if not any(module.children()):
                # a shared weight moves once; `cuda` has no index, and the weight's device has one
                waiting = [one for one in module.parameters() if one.device.type != target.type]
                module.to(target)
                done += sum(parameter.nbytes for parameter in waiting)
                progress(f"moving weights to {target.type}", done, total)
    return model.to(target)


@contextlib.contextmanager
def _reported(progress: StartProgress) -> Iterator[None]:
    """Report the tensors that transformers has read."""
    from transformers.utils import logging as hf_logging

    def counted(tensors: Any) -> Iterator[Any]:
        for number, tensor in enumerate(tensors):
            progress("reading weights", number, len(tensors))
            yield tensor

    def bar(factory: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        is_weights = args and kwargs.get("desc") == "Loading weights"
        return counted(args[0]) if is_weights else factory(*args, **kwargs)

    before = hf_logging.set_tqdm_hook(bar)
    try:
        yield
    finally:
        hf_logging.set_tqdm_hook(before)


def _read_weights(checkpoint: Checkpoint, model_class: Any, dtype: torch.dtype) -> Any:
    from transformers.utils import logging as hf_logging

    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    try:
        config = model_class.config_class.from_dict(dict(checkpoint.config))
        model, report = model_class.from_pretrained(
            checkpoint.path,
            config=config,
            dtype=dtype,
            use_safetensors=True,
            local_files_only=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # reported below, by name
        )
    except Exception as error:  # transformers may raise anything, depending on the files
        raise ModelConfigError(
            f"{checkpoint.path}: cannot be loaded: {type(error).__name__}: "
            f"{' '.join(str(error).split())}"
        ) from error
    missing = sorted(report["missing_keys"])
    misshapen = sorted(str(key[0]) for key in report["mismatched_keys"])
    if missing or misshapen or report["error_msgs"]:
        names = missing or misshapen or [str(message) for message in report["error_msgs"]]
        problem = "has no" if missing else "does not fit config.json in"
        raise ModelConfigError(
            f"{checkpoint.path}: the checkpoint {problem} {names[0]} (one of {len(names)}); "
            "config.json and the weights are of different models, or files are missing"
        )
    unloaded = [name for name, part in model.named_modules() if isinstance(part, UnloadedModule)]
    checkpoint.check_unread(report["unexpected_keys"], unloaded=unloaded)
    unread = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    assert not unread, f"never read: {unread[:3]}"
    return model


def _log(loaded: LoadedModel) -> None:
    logger.info(
        "model loaded",
        extra={
            "model": str(loaded.checkpoint.path),
            "stages": sorted(loaded.stages),
            "dtype": str(loaded.dtype).removeprefix("torch."),
            "device": str(loaded.device),
            "weights_bytes": loaded.weights_bytes,
            "native_kernels": native.variant_name() if loaded.device.type == "cpu" else "none",
            "linear_backend": loaded.packing.backend,
            "packed_layers": loaded.packing.num_layers,
            "packed_bytes": loaded.packing.num_bytes,
            "int8_layers": loaded.packing.num_int8_layers,
            "activation_scales": loaded.activation_scales[:12] or "none",
            "copied_bytes": loaded.packing.copied_bytes,
            "import_seconds": round(loaded.import_seconds, 3),
            "load_seconds": round(loaded.load_seconds, 3),
        },
    )


DECODER_LAYERS = frozenset(
    {"Gemma3DecoderLayer", "LlamaDecoderLayer", "Qwen2VLDecoderLayer", "Qwen2_5_VLDecoderLayer"}
)
"""Classes of transformers that compute what `DecoderLayer` does."""

VISION_BLOCKS = frozenset({"Qwen2VLVisionBlock", "Qwen2_5_VLVisionBlock"})
"""Classes of transformers that compute what `VisionBlock` does."""

MLPS = frozenset({"CLIPMLP", "SiglipMLP"})
"""Classes of transformers that compute what `Mlp` does, in layers that are not replaced."""


def use_kernels(model: nn.Module) -> None:
    """Replace the layers, MLPs and norms of a model in place."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            replacement = _replacement(child)
            if replacement is not None:
                setattr(parent, name, replacement)


def _replacement(module: Any) -> nn.Module | None:
    kind = type(module).__name__
    if kind in DECODER_LAYERS and gated_mlp(module.mlp) is not None:
        return DecoderLayer(module)
    if kind in VISION_BLOCKS and mlp_of(module.mlp) is not None:
        return VisionBlock(module)
    return mlp_of(module) if kind in MLPS else norm_of(module)


_COMPILER = "torch._dynamo"
_MASKS = "torch._dynamo._trace_wrapped_higher_order_op"
_CATALOGUE = "transformers.utils.import_utils"
_import_lock = threading.Lock()


@contextlib.contextmanager
def skip_unused_imports() -> Iterator[None]:
    """Import transformers, and build its models, in this context: 2.6 s less processor time.

    It leaves out two parts of torch, which take 2 s. `torch._dynamo` compiles functions that
    transformers marks; no marked function is compiled here. `torch.distributed.tensor` shards
    weights over processes, and a worker is one process.

    transformers lists the names in its 2,500 files twice: as `transformers` and as
    `transformers.models`. Here the second list reuses the first, which saves 0.6 s.
    """
    with _import_lock, _without_compiler(), _without_distributed(), _listing_names_once():
        yield


@contextlib.contextmanager
def _without_compiler() -> Iterator[None]:
    """Replace the compiler by a stub, unless it is imported already."""
    if _COMPILER in sys.modules:
        yield
        return
    compiler, masks = types.ModuleType(_COMPILER), types.ModuleType(_MASKS)
    for mark in ("disable", "allow_in_graph", "assume_constant_result"):
        setattr(compiler, mark, _unmarked)
    masks.TransformGetItemToIndex = _transform_get_item_to_index  # type: ignore[attr-defined]
    sys.modules |= {_COMPILER: compiler, _MASKS: masks}
    torch._dynamo = compiler
    try:
        yield
    finally:
        del sys.modules[_COMPILER], sys.modules[_MASKS]
        del torch._dynamo  # torch imports the real one on the next access


@contextlib.contextmanager
def _without_distributed() -> Iterator[None]:
    """Make torch report that it was built without `torch.distributed`."""
    is_available = torch.distributed.is_available
    torch.distributed.is_available = lambda: False
    try:
        yield
    finally:
        torch.distributed.is_available = is_available


@contextlib.contextmanager
def _listing_names_once() -> Iterator[None]:
    """Make transformers list each directory once; no effect if it is imported already."""
    finder = _Finder()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


class _Finder:
    """An import hook that caches the function of transformers that lists a directory."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != _CATALOGUE:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        loader: Any = spec and spec.loader
        if loader is None:
            return spec
        execute = loader.exec_module

        def execute_and_cache(module: Any) -> None:
            execute(module)
            if hasattr(module, "create_import_structure_from_path"):
                read = functools.cache(module.create_import_structure_from_path)
                module.create_import_structure_from_path = lambda path: copy.deepcopy(
                    read(_directory(path))  # a copy, because the caller modifies it
                )

        loader.exec_module = execute_and_cache
        return spec


def _directory(path: str | Path) -> str:
    return str(Path(path).parent if Path(path).is_file() else path)


def _unmarked(function: Callable[..., Any] | None = None, *_: Any, **__: Any) -> Any:
    """A decorator without effect; it may be used with or without arguments."""
    return _unmarked if function is None else function


def _transform_get_item_to_index() -> Any:
    """The real context manager: transformers enters it while it makes masks with vmap."""
    return importlib.import_module(_MASKS).TransformGetItemToIndex()
