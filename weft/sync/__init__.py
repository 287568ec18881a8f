"""Runs whose parts come together less often than every step: outer steps, a parameter server, federated clients.

This room stands beside `parallel`, `data`, `optim`, `watch` and `launch`: `train` imports it, and it imports `comm`,
`plan` and `job`. The processes of servers and workers are in `train`, since they train.
"""
