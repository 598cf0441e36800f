"""Runs one request over three pools: encode, reserve, prefill, decode; retries on losses.

Generation.run ─ attempt 1 ─ lost ─ attempt 2 (with the tokens already delivered) ─▶ FinishReason
Attempt.run    Encode ══╗
               Reserve ─╨─▶ Prefill ═ Accepted ─▶ Decode ═▶ DeliveredTokens, token by token
"""
