"""Models in GGUF files (github.com/ggml-org/ggml): read as Hugging Face folders.

`model_folder` writes the config and the tokenizer of a file; `tensors` reads its weights by their
names in transformers. Must never import jax: the server process calls it.
"""
