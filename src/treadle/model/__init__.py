"""The one definition of a model: spec (pure data), blocks, transformer, families, tokenizer and chat.

Nothing here knows training or serving. Both call the same modules on the same packed layout (the tokens of all
sequences side by side) and pass a context that says where sequences begin and how attention reads keys and values.
"""
