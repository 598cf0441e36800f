"""Walk through a model whose modules are replaced on the way."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn


def modules_in(parent: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    """Each module below, with the one that holds it and its name there; what replaces it, too.

    A module that was replaced is let go of before the next comes, so that a model whose weights are
    copied one layer after the other is never on a GPU twice.
    """
    for name in [name for name, _ in parent.named_children()]:
        yield parent, name, getattr(parent, name)
        yield from modules_in(getattr(parent, name))
