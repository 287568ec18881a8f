"""Where samples come from: corpora, tokenizers, the token store, the sampler and the loader."""
