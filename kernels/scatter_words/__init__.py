"""Op `scatter_words`: words[updates[i, 0]] = updates[i, 1], for all i; indexes do not repeat.

words: [W] int32; updates: [n, 2] int32. What the host has to say about many small tables in one copy.
"""
