"""How many replicas each pool gets of its need, on which node types, and how fast.

decide_replicas.py               one tick: all of the below, in this order
  capacity.py bounds.py            present replicas; bounds for this tick
  ownership.py pace.py shrink.py   who decides the size; up at once, down by rules
  allocate.py solve.py fill.py     all pools together: node types, ratios, budget
  fit_devices.py                   growth that fits the devices free at this moment
  decision_message.py              the reason as a sentence
  history.py                       what one tick passes to the next
"""
