"""transformers' Trainer on Weft's layouts."""
