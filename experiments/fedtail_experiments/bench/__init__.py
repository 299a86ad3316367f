"""A fixed suite of long-tailed federations, the same tuning for every method, and a leaderboard that anyone can
verify."""
