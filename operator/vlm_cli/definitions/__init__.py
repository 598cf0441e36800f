"""CustomResourceDefinitions: `vlm doctor` compares them, `make crds` writes them."""

from vlm_cli.definitions.manifests import KINDS, Kind, crd
from vlm_cli.definitions.schema import structural

__all__ = ["KINDS", "Kind", "crd", "structural"]
