"""Embedding tables spread over ranks: layout, exchange of ids and vectors, row-wise optimizers, host tables."""
