"""Parts of the generation of texts: logits of the next token, and what of a text can be shown."""
