"""Energy, power, temperature and errors of the devices that a run uses."""
