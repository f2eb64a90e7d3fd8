"""Attention of rows to the last tokens before them: a ring of earlier ones, and this step's."""
