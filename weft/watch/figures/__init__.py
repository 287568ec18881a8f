"""The figures of a report and of a plan's page, one file a subject."""
