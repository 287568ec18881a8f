"""Files and names: a run's folder, paths in object stores, texts of users."""
