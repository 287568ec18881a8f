"""The course: its languages, what its lessons print, and the checks of its exercises."""
