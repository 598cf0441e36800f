"""What each pool needs: from samples to units, with what may be concluded from them and what not.

estimate.py                           one tick: everything below, in its order
  readings.py window.py calibrate.py    samples ─▶ counters, windows, fitted service times
  attribute.py budget.py                where TTFT goes; how long a queue may take
  demand.py horizon.py                  load, growth within a start-up time
  size.py zero.py needs.py              units by every signal; the encoder at zero; together
"""
