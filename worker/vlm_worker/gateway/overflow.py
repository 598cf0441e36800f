"""What happens to the images of a request that exceeds the context: nothing, fewer tokens, or none.

    Refuse         400 `context_length_exceeded`
    ReduceOldest   the oldest images keep an eighth of their visual tokens, one by one until it fits
    DropOldest     the oldest images leave the prompt, one by one until it fits

Images of the last user message are never dropped: the question is about them. Images of
`detail: high` or `original`, and embeddings of clients, are never reduced. If the request still
exceeds the context, it is refused. A request that fits changes nothing, so prefix hits are lost
only where needed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from vlm_worker.core.families import Family
from vlm_worker.gateway.images import RequestImage
from vlm_worker.gateway.visual import Choice, OnContextExceeded, Why
from vlm_worker.reduction import Method, Reduction

EIGHTH = Reduction(Method.ZIP, 125)


@dataclasses.dataclass(frozen=True, slots=True)
class Fitted:
    """The images of a request in order, and the indices of those that leave the prompt."""

    images: tuple[RequestImage, ...]
    dropped: frozenset[int] = frozenset()


def fit(
    images: Sequence[RequestImage],
    num_excess: int,
    policy: OnContextExceeded,
    family: Family,
    *,
    num_last: int,
) -> Fitted:
    """Change images, the oldest first, until `num_excess` tokens are saved or none is left.

    `num_last` counts the images of the last user message. Dropping counts an image's visual tokens
    alone; the template's tokens around it are a few more.
    """
    if policy == "DropOldest":
        return _drop(images, num_excess, num_last=num_last)
    if policy == "ReduceOldest" and family.is_reducible:
        return Fitted(tuple(_reduce(images, num_excess, family)))
    return Fitted(tuple(images))


def _drop(images: Sequence[RequestImage], num_excess: int, *, num_last: int) -> Fitted:
    dropped: set[int] = set()
    for index, image in enumerate(images[: len(images) - num_last]):
        if num_excess <= 0:
            break
        dropped.add(index)
        num_excess -= image.num_tokens
    return Fitted(tuple(images), frozenset(dropped))


def _reduce(images: Sequence[RequestImage], num_excess: int, family: Family) -> list[RequestImage]:
    fitted = []
    for image in images:
        reduced = image if num_excess <= 0 else _reduced(image, family)
        num_excess -= image.num_tokens - reduced.num_tokens
        fitted.append(reduced)
    return fitted


def _reduced(image: RequestImage, family: Family) -> RequestImage:
    """The image with an eighth of its tokens; itself if it has no more, or needs all of them."""
    if image.grid_thw is not None:
        return image  # a client's embedding
    wants_all = image.choice.why is Why.DETAIL and image.choice.tier == "native"
    geometry = family.geometry(image.height, image.width, max_pixels=image.max_pixels)
    num_tokens = family.num_tokens(geometry.grid_thw, EIGHTH)
    if wants_all or num_tokens is None or num_tokens >= image.num_tokens:
        return image
    choice = Choice(image.choice.max_pixels, EIGHTH, "oldest", Why.CONTEXT)
    return dataclasses.replace(image, num_tokens=num_tokens, choice=choice)
