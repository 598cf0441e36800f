"""Decides how many replicas each pool has, and why. Pure: no clock, no I/O.

inputs     policy.py view.py constants.py, built by inputs.py from manifests and pods
estimate   estimate.py: readings.py window.py  samples ─▶ counter growth, requests of the window
                        calibrate.py           how long work takes
                        attribute.py           shares of TTFT by stage, waiting budgets
                        demand.py startups.py  load and its growth; how long new pods take
                        size.py                units by every signal; the encoder pool at zero
sleep      sleep.py                            whether the whole service is at zero
allocate   capacity.py bounds.py               present replicas; bounds for this tick
           ownership.py pace.py                who decides the size; how fast it changes
           allocate.py solve.py                all pools together: node types, ratios, budget
decide.py  one tick: all of the above          outcome.py  its results and reasons
memory.py history.py  what the next tick, or the next process, needs
record.py  one tick as JSON, for replay        explain.py  reasons and numbers as text
"""
