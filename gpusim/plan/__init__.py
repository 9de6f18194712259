"""Op graphs, schedules and plans, and the lowering from one to the next."""
