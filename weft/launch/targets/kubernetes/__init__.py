"""The target `kubernetes`: manifests, the client of the API, and the entry of the registry."""
