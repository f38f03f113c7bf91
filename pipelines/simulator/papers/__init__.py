"""Published tables, rebuilt with the simulator."""
