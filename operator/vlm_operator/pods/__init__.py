"""One role's pod template, as docs/contract.md and Pod Security `restricted` want it.

parts.py    what every pod has: labels, security, environment, probes, the model's mount
worker.py   encoder, prefill, decode
gateway.py  the gateway
placing.py  what a variant takes from its VLMNodeClass
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
