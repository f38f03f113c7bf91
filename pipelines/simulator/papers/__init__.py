"""Published tables, reproduced with the simulator."""
