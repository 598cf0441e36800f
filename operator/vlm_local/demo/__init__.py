"""`vlm demo`: a local cluster, the quickstart on it, and one answer about an image.

checks ─▶ control plane ─▶ nodes ─▶ model, operator, quickstart ─▶ Ready ─▶ port-forward ─▶ answer
"""
