"""Analysis of simulated schedules: explain, limits, what-if and transfer."""
