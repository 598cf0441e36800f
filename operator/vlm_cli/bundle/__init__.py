"""`vlm bundle`: one archive with what a bug report needs, without secrets.

command.py ─▶ collect.py: objects, logs, pages of pods, doctor, why ─▶ redact.py ─▶ tar.gz

No Secret is read. `redact.py` removes what looks like one from all files.
"""
