"""Op `add_rms_norm`: the residual stream takes a contribution in, and a norm of it comes out.

if added is not None: residual += added                 in place, [rows, size]
out = rms_norm(residual, weight, eps)                   [rows, size], in its own type
"""
