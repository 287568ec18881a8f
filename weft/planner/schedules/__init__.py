"""Pipeline schedules: action lists, the registry of schedules, stage splits and the simulator."""
