"""Runs an unlisted family: transformers' whole model, with its attention over KV blocks.

    ids, rows of this step's images ─▶ model(mm_encoder_outputs=...) ─▶ logits
    pixel_values ─▶ get_image_features ─▶ rows, and levels that later layers add beside them

Merging, levels, scales and caps stay transformers' own. Nothing is replaced but attention.
"""

from __future__ import annotations

import contextlib
import inspect
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch

from vlm_worker.core.encoding import encode_each
from vlm_worker.core.families import Family
from vlm_worker.core.image_geometry import DynamicProcessor, Processor, TilesProcessor
from vlm_worker.core.model_files import ModelConfigError
from vlm_worker.errors import EngineError
from vlm_worker.model.attention import StepContext, step_of_thread
from vlm_worker.model.vision import Embedding, is_finite
from vlm_worker.types import PreparedImage

TYPE_IDS: Final = ("mm_token_type_ids", "moe_mm_token_type_ids")


def model_class_of(config: Mapping[str, Any], where: str) -> Any:
    """Transformers' class of a model type. Raises ModelConfigError if it cannot be served."""
    from transformers import CONFIG_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

    model_type = config["model_type"]
    try:
        config_class = CONFIG_MAPPING[model_type]
        model_class = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[config_class]
    except (KeyError, ImportError) as error:
        raise ModelConfigError(
            f"{where}: model_type is {model_type!r}, for which this transformers has no "
            "image-text-to-text model that can be imported; use a model of a type in "
            "docs/families.md"
        ) from error
    if "mm_encoder_outputs" not in inspect.signature(model_class.forward).parameters:
        raise ModelConfigError(
            f"{where}: model_type is {model_type!r}, whose transformers model takes no "
            "mm_encoder_outputs, so images and text cannot be computed apart; use a model of a "
            "type in docs/families.md"
        )
    return model_class


def children_of(model: Any) -> Iterator[tuple[Any, str, Any, bool]]:
    """Parent, name, module and whether it belongs to the language model, of all parts of a model.

    To the language model belong the children with the decoder, and the head; to the encoder, all
    others.
    """
    base, decoder, head = model.base_model, model.get_decoder(), model.get_output_embeddings()
    for parent in {id(model): model, id(base): base}.values():
        for name, child in list(parent.named_children()):
            if child is not base:
                has_decoder = any(module is decoder for module in child.modules())
                yield parent, name, child, has_decoder or child is head


class GenericModel:
    """The language model of an unlisted family. One thread calls it."""

    def __init__(self, model: Any, family: Family) -> None:
        self._model, self._family = model, family
        self._parameters = frozenset(inspect.signature(model.forward).parameters)
        self._boxes_rows = False  # what `mm_encoder_outputs` holds; `try_boxes` finds it

    def logits(
        self,
        ids_T: torch.Tensor,
        images: Sequence[tuple[int, torch.Tensor]],
        positions_PT: torch.Tensor,
        step: StepContext,
        sampled_R: torch.Tensor,
    ) -> torch.Tensor:
        """Logits `[R, V]`; `images` are the first tokens of images, and rows with all levels."""
        rows_ND = self._rows(ids_T, images) if images else None
        with step_of_thread(step):
            return self.forward(ids_T, rows_ND, position_ids=positions_PT, logits_to_keep=sampled_R)

    def logits_and_head(
        self,
        ids_T: torch.Tensor,
        images: Sequence[tuple[int, torch.Tensor]],
        positions_PT: torch.Tensor,
        step: StepContext,
        sampled_R: torch.Tensor,
    ) -> tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]:
        """`logits`, and a function that gives those of any other tokens `[S]` of this step."""
        base, outputs = self._model.base_model, []
        hook = base.register_forward_hook(lambda *call: outputs.append(call[-1]))
        try:
            logits = self.logits(ids_T, images, positions_PT, step, sampled_R)
        finally:
            hook.remove()
        (output,) = outputs

        def head(tokens_S: torch.Tensor) -> torch.Tensor:
            # the whole model, since some bound the logits behind their head
            base.forward = lambda **_: output
            try:
                return self.forward(ids_T, None, logits_to_keep=tokens_S)
            finally:
                del base.forward

        return logits, head

    def forward(
        self, ids_T: torch.Tensor, rows_ND: torch.Tensor | None, **arguments: Any
    ) -> torch.Tensor:
        """Call transformers' model for one sequence, or packed ones; logits of the kept rows."""
        is_image = ids_T == self._family.image_token_id
        positions = arguments.get("position_ids")
        if positions is not None:
            arguments["position_ids"] = positions[:, None] if len(positions) > 1 else positions
        for name in TYPE_IDS:
            if name in self._parameters:
                arguments[name] = is_image.int()[None]
        if rows_ND is not None:
            arguments["mm_encoder_outputs"] = {"image": self._encoded(rows_ND)}
        output = self._model(input_ids=ids_T[None], use_cache=False, **arguments)
        logits: torch.Tensor = output.logits[0]
        return logits

    def try_boxes(self, ids_T: torch.Tensor, rows_ND: torch.Tensor, **arguments: Any) -> None:
        """Find how the model takes rows: as a batch, or as a list of images.

        Raises what the model raises if it takes neither.
        """
        for self._boxes_rows in (False, True):
            with contextlib.suppress(TypeError, AttributeError):
                self.forward(ids_T, rows_ND, **arguments)
                return
        self.forward(ids_T, rows_ND, **arguments)

    def takes(self, name: str) -> bool:
        """Whether the model has this argument."""
        return name in self._parameters

    def _rows(
        self, ids_T: torch.Tensor, images: Sequence[tuple[int, torch.Tensor]]
    ) -> torch.Tensor:
        """The rows of all placeholders of a step, in order.

        A placeholder without an image is a token that the model itself has answered; transformers
        reads it as text.
        """
        is_row = ids_T == self._family.image_token_id
        width = images[0][1].shape[-1]
        rows_TD = images[0][1].new_zeros(len(ids_T), width)
        is_text = is_row.clone()
        for start, rows in images:
            rows_TD[start : start + len(rows)] = rows
            is_text[start : start + len(rows)] = False
        if is_text.any():
            text = self._model.get_input_embeddings()(ids_T[is_text])
            rows_TD[is_text, : text.shape[-1]] = text
        return rows_TD[is_row]

    def _encoded(self, rows_ND: torch.Tensor) -> Any:
        """Rows in the form of transformers' encoder output."""
        main, *levels = rows_ND.chunk(1 + self._family.num_levels, dim=-1)

        def boxed(rows: torch.Tensor) -> Any:
            return [rows] if self._boxes_rows else rows[None]

        return types.SimpleNamespace(
            pooler_output=boxed(main), deepstack_features=[boxed(level) for level in levels]
        )


class GenericEncoder:
    """The vision tower and projector of an unlisted family; one image per call."""

    def __init__(self, model: Any, family: Family, *, device: torch.device) -> None:
        self._model, self._family, self._device = model, family, device

    def encode(
        self, images: Sequence[PreparedImage], *, scored: bool = False
    ) -> list[Embedding | Exception]:
        """Encode images; a failed one is an exception.

        Raises:
            EngineError: `scored` asks for scores of visual tokens, which no unlisted family has.
        """
        if scored:
            raise EngineError("the vision tower of this model has no scores of visual tokens")
        return encode_each(lambda some: [self._encode(image) for image in some], images)

    def _encode(self, image: PreparedImage) -> Embedding:
        inputs = encoder_inputs(self._family.processor, image)
        dtype = next(self._model.parameters()).dtype
        tensors = {
            name: value.to(self._device, dtype if value.is_floating_point() else None)
            for name, value in inputs.items()
        }
        rows = rows_of(self._model.get_image_features(**tensors, return_dict=True))
        width = self._family.hidden_size * (1 + self._family.num_levels)
        if rows.shape != (image.num_tokens, width):
            raise EngineError(
                f"the encoder made {len(rows)} rows of {rows.shape[-1]} values of grid "
                f"{image.grid_thw}, not {image.num_tokens} of {width}"
            )
        if not is_finite(rows):
            raise EngineError(f"the encoder's output for grid {image.grid_thw} is not finite")
        return Embedding(rows)


def encoder_inputs(processor: Processor, image: PreparedImage) -> dict[str, torch.Tensor]:
    """The arguments of `get_image_features` for one image."""
    values = torch.from_numpy(np.frombuffer(image.patches, np.float32).copy())
    if len(values) != np.prod(image.grid_thw) * processor.patch_dim:
        raise EngineError(f"an image with grid {image.grid_thw} has {len(values)} values")
    if isinstance(processor, DynamicProcessor):
        grid = torch.tensor([image.grid_thw], dtype=torch.int64)
        return {"pixel_values": values.view(-1, processor.patch_dim), "image_grid_thw": grid}
    if isinstance(processor, TilesProcessor):
        return {"pixel_values": values.view(-1, 3, processor.side, processor.side)}
    return {"pixel_values": values.view(1, 3, processor.height, processor.width)}


def rows_of(output: Any) -> torch.Tensor:
    """Rows `[N, D * (1 + levels)]` of an encoder's output.

    Raises:
        EngineError: it has no pooled output: the projector is not part of the encoder.
    """
    if output.pooler_output is None:
        raise EngineError("the projector belongs to the language model")
    parts = [output.pooler_output, *(getattr(output, "deepstack_features", None) or ())]
    joined = [part if isinstance(part, torch.Tensor) else torch.cat(tuple(part)) for part in parts]
    return torch.cat([part.reshape(-1, part.shape[-1]) for part in joined], dim=-1)


@contextlib.contextmanager
def plain_attention(model: Any) -> Iterator[None]:
    """Let transformers compute attention and masks itself, in its plainest way."""
    configs = {
        id(module.config): module.config for module in model.modules() if _has_config(module)
    }
    before = [(one, one._attn_implementation_internal) for one in configs.values()]
    try:
        for config in configs.values():
            config._attn_implementation_internal = "eager"
        yield
    finally:
        for config, name in before:
            config._attn_implementation_internal = name


def _has_config(module: Any) -> bool:
    return hasattr(getattr(module, "config", None), "_attn_implementation_internal")
