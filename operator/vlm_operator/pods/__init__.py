"""Builds pod templates. They follow docs/contract.md and Pod Security `restricted`.

parts.py    parts of every pod: labels, security, environment, probes, model mount
worker.py   pods of encoder, prefill and decode
gateway.py  pods of the gateway
placing.py  values that a variant takes from its VLMNodeClass
"""

from vlm_operator.pods.gateway import CONFIG_KEY, gateway_config, gateway_template
from vlm_operator.pods.parts import Images, labels, object_labels, selector
from vlm_operator.pods.placing import place
from vlm_operator.pods.worker import worker_template

__all__ = [
    "CONFIG_KEY",
    "Images",
    "gateway_config",
    "gateway_template",
    "labels",
    "object_labels",
    "place",
    "selector",
    "worker_template",
]
