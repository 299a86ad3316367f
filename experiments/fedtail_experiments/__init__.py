"""The paper's tables and figures, the leaderboard, and what only they need; ``fedtail`` finds it by entry points."""
