"""Op `decoder_stack`: all layers of a dense decoder in one call, for machines where calls cost.

Contract: with the tensors of a `ForwardBatch`, compute what the layered network computes: embed, for
every layer norm, attention over paged KV (which is written) and gated MLP, and the final norm of the
rows that leave. Its reference is the layered network over the reference kernels.

A small model's layer takes 50-200 microseconds here, so per-op calls, their scratch tensors and the
GIL would cost as much as the arithmetic. One compiled function runs the whole step on a few threads
that meet at barriers, without the GIL.
"""
