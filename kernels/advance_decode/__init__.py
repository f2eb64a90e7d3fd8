"""Op `advance_decode`: what a decoding step leaves for the next one, all on the device.

For each sequence s with context_lens[s] > 0:

    history[s, num_sampled[s]] = sampled[s]          history: [S, capacity] int32, cut at capacity
    num_sampled[s] += 1
    token_ids[s] = sampled[s]
    context_lens[s] += 1; positions[s] += 1          (the position of the token to come, for noise)
    if num_sampled[s] == max_sampled[s]: context_lens[s] = 0        (it is complete: a padding row)

The slot of a new token follows from its block table and context length, so none is kept.
"""
