"""What is generated from the API's types: crds/*.yaml and docs/api.md."""

from vlm_operator.crd.manifests import KINDS, Kind, crd
from vlm_operator.crd.reference import reference
from vlm_operator.crd.schema import structural

__all__ = ["KINDS", "Kind", "crd", "reference", "structural"]
