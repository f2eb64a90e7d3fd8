"""Op `commit_step`: keep what a step sampled where the next one looks for it.

For each row b of rows [B, 2] int32, (slot, context length), with a context length above 0:

    out[b] = sampled[b] if is_finite[b] else -1            out: [B] int32
    last_token[slot] = max(out[b], 0)                      last_token: [N] int32

Padding rows leave everything as it is. sampled: [B] int32; is_finite: [B] bool.
"""
