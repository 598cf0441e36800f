"""The comparison of autoscalers in simulated time; `bench/simulate.py` runs it.

compare.py         runs, grids and totals             mixed.py    node types, by price
forecast_bound.py  an autoscaler that knows the load  perturb.py  wrong predictions, lost nodes
waiting.py         how long work waits (Erlang C)    ablate.py  the policy without one mechanism
"""
