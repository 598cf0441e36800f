"""Iterates over the modules of a model while the caller replaces them."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn


def modules_in(parent: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    """Yield each descendant as (parent, name, module); replacements are descended into, too.

    The iterator drops a replaced module before it yields the next. So a model whose weights are
    copied layer by layer is never on a GPU twice.
    """
    for name in [name for name, _ in parent.named_children()]:
        yield parent, name, getattr(parent, name)
        yield from modules_in(getattr(parent, name))
