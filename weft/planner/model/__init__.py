"""What a model is made of: parameters, FLOPs and the quantities that the estimates need."""
