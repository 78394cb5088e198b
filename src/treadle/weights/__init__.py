"""Reading and writing models: Hugging Face directories, GGUF files, the weight ledger."""
