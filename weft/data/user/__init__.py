"""Datasets of users, named by `data.source: package.module:name`."""
