"""`vlm plan`: from a model's config.json, node classes and a load to pools, cost and a manifest.

facts.py     shapes of a model               speed.py     seconds of encode, prefill and steps
model.py     config.json ─▶ ModelFacts       pool.py      queueing model of one pool
images.py    visual tokens by size           topology.py  the cheapest pools that meet the goals
capacity.py  bytes: KV, weights, transfers   manifest.py  VLMService, and a plan's input from one
nodes.py     VLMNodeClass ─▶ Node            report.py    the sections of the output
load.py      what the user gives             command.py   files, cluster, output
fields.py    JSON, read strictly
"""
