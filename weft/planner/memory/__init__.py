"""Memory of one rank: parameters, gradients, optimizer states, activations and buffers."""
