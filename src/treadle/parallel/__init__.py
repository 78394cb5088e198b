"""The plan (a parallel layout), the mesh of ranks it spans, and layouts applied to a model from outside."""
