"""Policies: each published system that turns a step into a schedule, one file each."""

#: Streams that a policy may use where nobody says, in every command and in the dashboard.
DEFAULT_STREAMS = 8
#: The policy where nobody names one.
DEFAULT_POLICY = "critical_path"
#: In place of a policy's name: whatever `gpusim.search.explore` recommends.
RECOMMENDED = "recommended"
