"""HTTP gateway: translates OpenAI's API to the workers' protocol. Imports no torch.

http_app ─▶ body, api (read, validate) ─▶ images, prompts (count and place tokens)
    ─▶ orchestrate (encode, prefill, decode; retry if a pod fails) ─▶ responses (SSE)
                                       responding (reasoning and tool calls) ─┘
responses_api (/v1/responses as a chat, by its dialect)
discovery ─▶ pod_registry (pods and their load) ─▶ route (pods of an attempt)
ttft_trace (TTFT by stage) ─▶ metrics
"""
