"""Serving: the engine and its requests, sampling, a batched key-value cache, conversations; `api` is the HTTP face."""
