"""How many replicas each pool should have, and why: values in, values out, no clock, no I/O.

policy.py view.py    what a decision is made from        inputs.py    read from manifests and pods
decide.py            one tick: estimate, then settle     outcome.py   what it returns

estimate.py          what each pool needs
  readings.py window.py calibrate.py    samples ─▶ counters, windows, fitted service times
  attribute.py budget.py                where TTFT goes; how long a queue may take
  demand.py horizon.py waiting.py       load, growth within a start-up time, Erlang's C
  size.py zero.py needs.py              units by every signal; the encoder at zero; together

settle.py            how many replicas it gets
  stock.py goal.py                      what stands; bounds for this tick
  ownership.py pace.py shrink.py flaps.py   who decides; up at once, down by rules; damping
  couple.py solve.py fill.py            all pools together: node types, ratios, budget
  telling.py reasons.py                 in words

memory.py record.py codec.py            what survives a restart; a tick that can be replayed
explain.py                              why each pool has its size, for people
"""
