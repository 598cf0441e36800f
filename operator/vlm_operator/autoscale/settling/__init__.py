"""How many replicas each pool gets of what it needs, on which node types, and how fast.

settle.py                             one tick: everything below, in its order
  stock.py goal.py                      what stands; bounds for this tick
  ownership.py pace.py shrink.py flaps.py   who decides; up at once, down by rules; damping
  couple.py solve.py fill.py            all pools together: node types, ratios, budget
  admit.py                              how much of that may be had at this instant
  telling.py                            in words
  paced.py                              what is remembered from one tick to the next
"""
