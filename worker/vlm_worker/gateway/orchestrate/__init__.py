"""One request over three pools: encode beside reserve, prefill, decode; elsewhere on a loss.

Generation.run ─ attempt 1 ─ lost ─ attempt 2 (with the tokens already delivered) ─▶ FinishReason
Attempt.run    Encode ══╗
               Reserve ─╨─▶ Prefill ═ Accepted ─▶ Decode ═▶ Answer, token by token
"""
