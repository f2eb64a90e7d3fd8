"""Op `rotary_store_kv`: from the qkv projection's rows to rotated queries and stored keys and values.

For each of T rows at position p: q, k, v are the heads of qkv [T, (heads + 2 * kv_heads) * head_dim];
q and k are normed over each head (if there are norms) and rotated by p; q goes to q_out
[T, heads * head_dim], k and v to slot_mapping[row] of the blocks. A slot below 0 is not written.
"""
