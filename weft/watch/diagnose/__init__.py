"""Why a run is slow, or why it failed: causes found in its folder."""
