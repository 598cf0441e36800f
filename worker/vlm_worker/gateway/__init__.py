"""HTTP gateway: translates OpenAI's API to the workers' protocol. Imports no torch.

http_app ─▶ api (parse, validate) ─▶ images, prompts (count and place tokens)
    ─▶ orchestrate (encode, prefill, decode; retry if a pod fails) ─▶ api.answers (SSE)
discovery ─▶ pod_registry (pods and their load) ─▶ route_selection (pods of an attempt)
ttft_trace (TTFT by stage) ─▶ metrics
"""
