"""Why a schedule takes as long as it does, and what would change it: explain, limits, what-if."""
