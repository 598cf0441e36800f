"""Builds pod templates. They follow docs/contract.md and Pod Security `restricted`.

overlay.py  merges podTemplate into a pod template
parts.py    parts of every pod: labels, security, environment, probes, model mount
worker.py   pods of encoder, prefill and decode; what a variant takes from its VLMNodeClass
gateway.py  pods of the gateway
"""
