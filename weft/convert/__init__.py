"""Jobs from the configuration files of other libraries: one file a format, with its table of settings."""
