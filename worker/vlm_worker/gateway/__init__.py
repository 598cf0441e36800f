"""The front door: OpenAI's API on one side, the workers' protocol on the other. No torch here.

app ─▶ api (is it well-formed?) ─▶ pictures, prompt (what is it in tokens?)
    ─▶ orchestrate (encode, prefill, decode, elsewhere when a pod dies) ─▶ api.answers (SSE)
discovery ─▶ registry (who is there, how loaded) ─▶ route (who shall do it)
timeline (where did the time go) ─▶ meters
"""
